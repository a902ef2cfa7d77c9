"""Activation checkpointing: what of a layer is kept for the backward pass, and where.

A layer that is checkpointed keeps its input and is computed again when its gradient is due. `selective` also keeps the
output of attention, the part whose cost per byte grows with the length of a row: of a row of 32k tokens it is a third
of what a 7B model would compute again. With `model.activation_offloading` the inputs wait on the host.
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

# Kernels of attention, by the names of their operators: torch's, its variable-length one, and the package flash_attn's.
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
    """Checkpoint the layers of a transformer as the recipe says, in place. Nothing where it does not ask for it.

    A trainer may switch checkpointing off and on again (TRL's do, around the reference): it stays of this kind. Raises
    ModelError for an architecture that does not mark its layers.
    """
    if not section.gradient_checkpointing:
        return
    if section.gradient_checkpointing == "selective" or section.activation_offloading:
        causal = causal_of(model)
        if not any(isinstance(module, GradientCheckpointingLayer) for module in causal.modules()):
            raise ModelError(
                f"{type(causal).__name__} does not say which of its modules are layers",
                where="model.gradient_checkpointing",
                hint="write `gradient_checkpointing: true`, without `activation_offloading`",
            )
        switch = functools.partial(_set_function, causal._set_gradient_checkpointing, checkpoint_function(section))
        causal._set_gradient_checkpointing = switch
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def checkpoint_function(section: Model) -> Callable[..., Any]:
    """What runs a layer and its arguments so that it is computed again in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False}
    if section.gradient_checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    run = functools.partial(checkpoint, **options)
    return ActivationOffload(run) if section.activation_offloading else run


def keep_attention(_: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    """Of the operators of a layer, those of attention are not computed again."""
    found = isinstance(operator, torch._ops.OpOverload) and operator.name().partition(".")[0] in ATTENTION
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE


def _set_function(setter: Callable[..., None], run: Callable[..., Any], **options: Any) -> None:
    """transformers' own switch, with our function in the place of the one that it is given."""
    setter(**{**options, "gradient_checkpointing_func": run})
