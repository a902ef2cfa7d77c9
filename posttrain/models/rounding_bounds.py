"""Bounds on rounding error: how far results of the same weights may differ when computed in two ways."""

from __future__ import annotations

import torch
from torch import Tensor

# Mean gap in nats between log-probs of the same tokens, with margin: measured 2e-6 in float32, 0.02-0.05 in bfloat16.
_LOGPS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}

# Other implementations may be less precise in float32: vLLM's GPU attention kernels multiply in TF32 (10 bits).
_OTHER_KERNELS = {torch.float32: 0.01}

# Largest accepted gap between logits of the same text: RMS of their differences divided by the RMS of the logits.
# Both sides compute in the same type; an unmerged adapter on a half-precision base is summed in float32, and merging it
# rounds once more, which may double the gap.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def logp_tolerance(dtype: torch.dtype, *, other_kernels: bool = False) -> float:
    """Return the largest mean gap in nats that rounding explains if products are computed in `dtype`.

    other_kernels: one side is another implementation of the model, such as vLLM, not the same one in another order.
    """
    table = _LOGPS | _OTHER_KERNELS if other_kernels else _LOGPS
    return table.get(dtype, table[torch.float32])


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS of the differences of two tensors divided by the RMS of `expected`; infinite for NaN or unequal
    shapes.

    The largest single difference is less informative: of a million bfloat16 values, one is always far off.
    """
    if actual.shape != expected.shape:
        return float("inf")
    gap = float((actual - expected).norm() / expected.norm().clamp_min(1e-6))
    return gap if gap == gap else float("inf")
