"""torch.compile for the passes of training, and for them alone.

Each decoder layer is compiled by itself: all layers of a model share one graph, and what is compiled once serves every
micro-batch, because shapes are dynamic. Attention over packed rows is part of the graph where there is a kernel for it
(`attention`); where rows attend one by one it stays out: their lengths would make a graph of their own of every number
of rows. Generation, probes and saving run as they are, since the layers are switched only inside the context.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic_shapes
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ModelError, RecipeError
from posttrain.recipe.sections import Model

Switch = Callable[[], AbstractContextManager[None]]


def check(section: Model, device: torch.device) -> None:
    """Refuse `model.compile` where nothing can compile, before a model is loaded. Raises RecipeError."""
    if not section.compile:
        return
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++", "cl"]
    if not any(map(shutil.which, compilers)):
        raise RecipeError(
            "model.compile needs a C++ compiler, and none is on the PATH", hint="install g++, or leave it out"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise RecipeError("model.compile needs triton on a GPU", hint="pip install triton, or leave it out")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer. Raises ModelError for an architecture that does not mark them."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are layers")
    return list(found)


def compile_layers(model: nn.Module, section: Model) -> Switch:
    """A function that opens a context in which the layers of `model` are compiled; one without effect if the recipe
    does not ask for it. The backward pass belongs inside: with checkpointing it runs the layers again."""
    if not section.compile:
        return nullcontext
    forwards = [(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers_of(model)]
    forwards[0] = (forwards[0][0], _like_the_others(forwards[0][1]))
    return lambda: _without_size_guards(forwards)


def _like_the_others(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The first layer under an adapter, with an input that has a gradient as those of the others have: else it would
    need a graph of its own, which takes as long to compile as theirs. Nobody reads that gradient."""

    @wraps(forward)
    def first(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return forward(hidden_states, *args, **kwargs)

    return first


@contextmanager
def _without_size_guards(forwards: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Numbers that happen to be equal in the first micro-batch, say rows and a head's size, are taken for equal by
    torch as it comes, and the next one needs another graph: ten seconds of a step on a GPU."""
    try:
        for layer, forward in forwards:
            layer.forward = forward
        with symbolic_shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # made at import
            yield
    finally:
        for layer, _ in forwards:
            layer.__dict__.pop("forward", None)  # the class's own again
