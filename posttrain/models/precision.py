"""Training precision: trained weights in float32, matrix products in the model's bfloat16 or float16.

AdamW in pure bfloat16 loses updates below 1/256 of a weight, the usual size of RL's updates. So trainable parameters
are stored in float32 and autocast computes in half precision; frozen weights (the base under LoRA) keep their loaded
type.

With `model.half_weights` the model itself stays in bfloat16, including residuals and norms, and float32 weights belong
to the optimizer (`train.optim.MasterAdamW`): less memory traffic, but sums along the layers are rounded.

float16 has three more mantissa bits than bfloat16, so trainer and engine agree better (2510.26788), and a smaller
range: small gradients underflow unless the loss is scaled up, see `train.optim.loss_scaler`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from posttrain.models.experts import compute_experts_in_half

HALF = (torch.bfloat16, torch.float16)


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type that products are computed in: autocast's type inside autocast, otherwise `dtype`."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def keep_half_weights(model: nn.Module) -> None:
    """Keep the trainable parameters in bfloat16 and accumulate their gradients in float32."""
    compute_experts_in_half()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in HALF:
            parameter.grad_dtype = torch.float32


def keep_master_weights(model: nn.Module) -> torch.dtype | None:
    """Cast trainable parameters to float32 in place; return the half precision to compute in, None for float32.

    Adapter layers then leave the cast of their inputs to autocast, as ordinary layers do: PEFT would first make a
    float32 copy of each input.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    half = next((dtype for dtype in HALF if dtype in dtypes), None)
    module: Any
    for module in model.modules():
        if half is not None and hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    if half is not None:
        compute_experts_in_half()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return half
