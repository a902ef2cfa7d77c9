"""Sparsification of the difference between two models: pure functions, one tensor at a time.

A `draw` holds one uniform random number in [0, 1) per entry; the caller generates it, so that the functions stay pure.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.merge import global_topk
from posttrain.merge.blocks import iterate_blocks, map_blocks

_MIN_NORM = 1e-7  # L1 norms below this are not used as divisors


def keep_largest(delta: Tensor, count: int) -> Tensor:
    """Return the `count` entries of largest magnitude, 0 elsewhere. Ties go to earlier entries."""
    if count >= delta.numel():
        return delta
    if count <= 0:
        return torch.zeros_like(delta)
    return torch.where(mask_largest(delta, count), delta, delta.new_zeros(()))


def drop_extremes(delta: Tensor, density: float, gamma: float) -> Tensor:
    """Drop the int(gamma n) entries of largest magnitude, keep the next int(density n) (Model Breadcrumbs).

    If both do not fit into n entries, fewer entries are dropped at the top.
    """
    n = delta.numel()
    keep = min(int(density * n), n)
    top = max(min(int(gamma * n), n - keep), 0)
    kept = keep_largest(delta, top + keep)
    return kept if top == 0 else torch.where(mask_largest(delta, top), delta.new_zeros(()), kept)


def mask_largest(delta: Tensor, count: int) -> Tensor:
    """Return a bool mask of the `count` largest magnitudes, 0 < count <= n; ties go to earlier entries.

    The threshold is found by a radix select, block by block: no sort, and no memory besides the result.
    """
    edge = global_topk.find_threshold(lambda: (("", block) for (block,) in iterate_blocks(delta)), count)
    above = map_blocks(lambda part: part.abs() > edge, delta, dtype=torch.bool)
    missing = count - int(above.sum())
    for found, part in iterate_blocks(above, delta):
        equal = (part.abs() == edge).nonzero()[:missing, 0]
        found[equal] = True
        missing -= len(equal)
        if missing == 0:
            break
    return above


def restore_norm(kept: Tensor, whole: Tensor) -> Tensor:
    """Scale `kept` to the L1 norm of `whole` (mergekit's `rescale`)."""
    return kept * norm_ratio(*(float(tensor.abs().sum(dtype=torch.float64)) for tensor in (whole, kept)))


def norm_ratio(whole: float, kept: float) -> float:
    """Return the factor that scales the L1 norm `kept` to `whole`; 1 if either is below 1e-7."""
    return 1.0 if min(whole, kept) < _MIN_NORM else whole / kept


def keep_randomly(delta: Tensor, probability: Tensor | float, draw: Tensor, *, rescale: bool) -> Tensor:
    """Keep entries with draw < probability; `rescale` divides them by the probability, which preserves the mean."""
    chance = torch.as_tensor(probability, dtype=delta.dtype, device=delta.device).expand_as(delta)
    kept = draw < chance
    return torch.where(kept, delta / chance if rescale else delta, torch.zeros_like(delta))


def compute_rank_probabilities(delta: Tensor, density: float, epsilon: float) -> Tensor:
    """Return DELLA's keep probabilities, which grow with an entry's rank in its row (last axis).

    (density - epsilon) + 2 epsilon rank / (n - 1), rank 0 for the smallest magnitude, clamped to [0, 1]; density for
    rows with one entry. Equal magnitudes are ranked by position.
    """
    n = delta.shape[-1] if delta.dim() else 1
    if n == 1:
        return torch.full_like(delta, density).clamp(0, 1)
    order = delta.abs().argsort(dim=-1, stable=True)
    ranks = torch.empty_like(delta)
    ranks.scatter_(-1, order, torch.arange(n, dtype=delta.dtype, device=delta.device).expand_as(delta))
    return (density - epsilon + ranks / (n - 1) * 2 * epsilon).clamp(0, 1)
