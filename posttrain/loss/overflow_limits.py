"""Limits on what a loss reads, for numbers that would overflow, which leave the way back open.

Shapes: tensors of any shape; the result has the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Limited(torch.autograd.Function):
    """`clamp` whose gradient is 0 beyond the limits only where it leads further out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        outward = ((x > ctx.high) & (grad < 0)) | ((x < ctx.low) & (grad > 0))  # descent goes against the gradient
        return grad.masked_fill(outward, 0.0), None, None


def limit_value(x: Tensor, low: float, high: float) -> Tensor:
    """x within [low, high]. Beyond, a loss of it keeps the value and the gradient that it has at the limit, unless that
    gradient would drive x further out.

    `clamp` has no gradient there: a penalty that has run into its limit would no longer pull anything back.
    """
    found: Tensor = _Limited.apply(x, low, high)  # type: ignore[no-untyped-call]
    return found
