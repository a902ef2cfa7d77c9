"""How far apart the same weights may be, computed in two ways, and it is still rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Nats between log-probs of the same tokens, on average, with room: measured 2e-6 in float32, 0.02 to 0.05 in bfloat16.
_LOGPS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}

# Another implementation's float32 may be less: vLLM's attention kernels on a GPU multiply it as TF32, 10 bits.
_OTHER_KERNELS = {torch.float32: 0.01}

# Largest accepted gap between logits of the same text: root mean square of their differences over that of the logits.
# All weights are compared in the same arithmetic; an adapter beside a half-precision base sums in float32 in memory and
# is rounded once more when merged, which may cost twice as much.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def logp_tolerance(dtype: torch.dtype, *, other_kernels: bool = False) -> float:
    """Largest mean gap in nats that rounding explains where products are computed in `dtype`.

    other_kernels: one side is another implementation of the model, such as vLLM, and not this one in another order.
    """
    table = _LOGPS | _OTHER_KERNELS if other_kernels else _LOGPS
    return table.get(dtype, table[torch.float32])


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences of two tables over that of the second; infinite for NaN and other shapes.

    The largest single difference would say less: of a million entries in bfloat16 one is always far off.
    """
    if actual.shape != expected.shape:
        return float("inf")
    gap = float((actual - expected).norm() / expected.norm().clamp_min(1e-6))
    return gap if gap == gap else float("inf")
