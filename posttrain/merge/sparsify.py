"""What is left of a difference between two models: pure functions, one tensor at a time.

A `draw` holds one uniform number in [0, 1) an entry; the caller makes it, so that the functions stay pure.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(delta: Tensor, count: int) -> Tensor:
    """The `count` entries of largest magnitude, 0 elsewhere. Of equal entries the one that comes first is kept."""
    if count >= delta.numel():
        return delta
    kept = torch.zeros_like(delta)
    if count > 0:
        flat = delta.reshape(-1)
        places = _descending(flat)[:count]
        kept.view(-1)[places] = flat[places]
    return kept


def middling(delta: Tensor, density: float, gamma: float) -> Tensor:
    """Drop the int(gamma n) entries of largest magnitude, keep the int(density n) that follow (Model Breadcrumbs).

    Where both do not fit into n entries, fewer are dropped at the top.
    """
    n = delta.numel()
    keep = min(int(density * n), n)
    top = max(min(int(gamma * n), n - keep), 0)
    flat, kept = delta.reshape(-1), torch.zeros_like(delta)
    places = _descending(flat)[top : top + keep]
    kept.view(-1)[places] = flat[places]
    return kept


def by_chance(delta: Tensor, probability: Tensor | float, draw: Tensor, *, rescale: bool) -> Tensor:
    """Keep an entry where draw < probability; `rescale` divides it by its probability, so that the mean stays."""
    chance = torch.as_tensor(probability, dtype=delta.dtype, device=delta.device).expand_as(delta)
    kept = draw < chance
    return torch.where(kept, delta / chance if rescale else delta, torch.zeros_like(delta))


def rank_probabilities(delta: Tensor, density: float, epsilon: float) -> Tensor:
    """DELLA's chance to keep an entry, shape of `delta`: it grows with the entry's rank in its row (last axis).

    (density - epsilon) + 2 epsilon rank / (n - 1), rank 0 for the smallest magnitude, held within [0, 1]; density in a
    row of one entry. Equal magnitudes are ranked by position.
    """
    n = delta.shape[-1] if delta.dim() else 1
    if n == 1:
        return torch.full_like(delta, density).clamp(0, 1)
    order = delta.abs().argsort(dim=-1, stable=True)
    ranks = torch.empty_like(delta)
    ranks.scatter_(-1, order, torch.arange(n, dtype=delta.dtype, device=delta.device).expand_as(delta))
    return (density - epsilon + ranks / (n - 1) * 2 * epsilon).clamp(0, 1)


def _descending(flat: Tensor) -> Tensor:
    return flat.abs().argsort(descending=True, stable=True)
