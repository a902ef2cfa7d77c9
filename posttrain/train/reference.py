"""The reference policy: the frozen starting point that a KL term measures against.

Under LoRA it costs nothing: the base without its adapter (or a frozen second adapter). Full training keeps a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from posttrain.models.load import LoadedModel

ReferencePolicy = Callable[[], AbstractContextManager[nn.Module]]


def reference_policy(loaded: LoadedModel) -> ReferencePolicy:
    """A function that opens a context in which the yielded model is the reference, gradients off, in eval mode."""
    if loaded.is_lora:
        return lambda: _adapter_off(loaded.model)
    frozen = copy.deepcopy(loaded.model).eval().requires_grad_(False)
    return lambda: _frozen(frozen)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[nn.Module]:
    with torch.no_grad():
        yield model


@contextmanager
def _adapter_off(model: Any) -> Iterator[nn.Module]:
    """The PEFT model with its trained adapter off, or with the frozen adapter `reference` in its place."""
    training = model.training
    model.eval()
    with torch.no_grad():
        try:
            if "reference" in model.peft_config:
                model.set_adapter("reference")
                yield model
            else:
                with model.disable_adapter():
                    yield model
        finally:
            if "reference" in model.peft_config:
                model.set_adapter("default")  # also makes it trainable again
                for name, parameter in model.named_parameters():
                    if ".reference." in name:
                        parameter.requires_grad_(False)
            model.train(training)
