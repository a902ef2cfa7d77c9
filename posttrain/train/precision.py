"""Precision of training: trained weights in float32, matrix products in the model's half precision.

AdamW in pure bfloat16 loses updates below 1/256 of a weight, which is where RL's learning rates live. So trainable
parameters are kept in float32 and autocast computes; frozen weights (the base under LoRA) stay as they were loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)


def keep_master_weights(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Cast trainable parameters to float32 in place; the returned function opens the matching autocast context."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    half = next((d for d in HALF if d in dtypes), None)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if half is None:
        return nullcontext
    return functools.partial(torch.autocast, next(model.parameters()).device.type, dtype=half)
