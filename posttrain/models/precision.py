"""Precision of training: trained weights in float32, matrix products in the model's bfloat16.

AdamW in pure bfloat16 loses updates below 1/256 of a weight, which is where RL's learning rates live. So trainable
parameters are kept in float32 and autocast computes; frozen weights (the base under LoRA) stay as they were loaded.
"""

from __future__ import annotations

import torch
from torch import nn

from posttrain.errors import ModelError


def keep_master_weights(model: nn.Module) -> torch.dtype | None:
    """Cast trainable parameters to float32 in place; returns the half precision to compute in, None for float32.

    Raises ModelError for float16: small gradients vanish in it without loss scaling, which is not done here.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.float16 in dtypes:
        raise ModelError("float16 weights cannot be trained", hint="set model.dtype to auto, bfloat16 or float32")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return torch.bfloat16 if torch.bfloat16 in dtypes else None
