"""Activation checkpointing: which activations of a layer are saved for the backward pass, and where.

A checkpointed layer saves its input and is recomputed in the backward pass. `selective` also saves the output of
attention, the operator whose cost per byte grows with sequence length: for a row of 32k tokens it is a third of what a
7B model would recompute. With `model.activation_offloading` the inputs are stored on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ModelError
from posttrain.models.activation_offload import ActivationOffload
from posttrain.models.adapters import causal_of
from posttrain.recipe.sections import Model

# Operator names of attention kernels: torch's, torch's variable-length one, and those of the package flash_attn.
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
)


def checkpoint_layers(model: Any, section: Model) -> None:
    """Enable checkpointing of a transformer's layers in place, as the recipe asks; do nothing if it does not.

    A trainer may switch checkpointing off and on again (TRL's do, around the reference): the kind stays the same.
    Raises ModelError for an architecture that does not mark its layers.
    """
    if not section.gradient_checkpointing:
        return
    if section.gradient_checkpointing == "selective" or section.activation_offloading:
        causal = causal_of(model)
        if not any(isinstance(module, GradientCheckpointingLayer) for module in causal.modules()):
            raise ModelError(
                f"{type(causal).__name__} does not mark which of its modules are layers",
                where="model.gradient_checkpointing",
                hint="write `gradient_checkpointing: true`, without `activation_offloading`",
            )
        switch = functools.partial(
            _set_checkpoint_function, causal._set_gradient_checkpointing, checkpoint_function(section)
        )
        causal._set_gradient_checkpointing = switch
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def checkpoint_function(section: Model) -> Callable[..., Any]:
    """Return the function that runs a layer with its arguments so that it is recomputed in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False}
    if section.gradient_checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    run = functools.partial(checkpoint, **options)
    return ActivationOffload(run) if section.activation_offloading else run


def keep_attention(_: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    """Return the checkpoint policy of an operator: outputs of attention are saved, all others recomputed."""
    found = isinstance(operator, torch._ops.OpOverload) and operator.name().partition(".")[0] in ATTENTION
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE


def _set_checkpoint_function(setter: Callable[..., None], run: Callable[..., Any], **options: Any) -> None:
    """Call transformers' own switch with our checkpoint function in place of the given one."""
    setter(**{**options, "gradient_checkpointing_func": run})
