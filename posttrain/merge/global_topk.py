"""Selection of the largest entries of a whole model, reading one tensor at a time: counts per tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_BITS_PER_PASS = 16  # bits of the threshold found per pass

# Each call starts a new iterator with the same names in the same order
Deltas = Callable[[], Iterator[tuple[str, Tensor]]]


def count_per_tensor(deltas: Deltas, density: float, at_least_one: bool) -> dict[str, int]:
    """Return for each tensor how many of the model's int(density * size) largest magnitudes it contains.

    Ties go to earlier tensors and earlier entries, so the entries to keep are the `count` largest of each tensor. This
    is a radix select that holds one tensor at a time: the bits of non-negative floats are ordered like the floats, and
    each pass over the tensors finds 16 more bits of the threshold. Tensors may have any shape.
    """
    sizes = {name: delta.numel() for name, delta in deltas()}
    wanted = int(density * sum(sizes.values()))
    wanted = max(wanted, int(at_least_one and density > 0))
    if wanted >= sum(sizes.values()):
        return sizes
    if wanted == 0:
        return dict.fromkeys(sizes, 0)
    threshold = _threshold_bits(deltas, wanted)
    above, equal = {}, {}
    for name, delta in deltas():
        bits = _magnitude_bits(delta)
        above[name], equal[name] = int((bits > threshold).sum()), int((bits == threshold).sum())
    remaining = wanted - sum(above.values())
    counts = {}
    for name in sizes:
        taken = min(remaining, equal[name])
        counts[name], remaining = above[name] + taken, remaining - taken
    return counts


def find_threshold(deltas: Deltas, wanted: int) -> float:
    """Return the `wanted`-th largest magnitude over all tensors. Tensors may have any shape."""
    dtype = next(deltas())[1].dtype
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    return float(torch.tensor([_threshold_bits(deltas, wanted)], dtype=bits).view(dtype))


def _threshold_bits(deltas: Deltas, wanted: int) -> int:
    """Return the bits of the `wanted`-th largest magnitude."""
    width = 64 if next(deltas())[1].dtype == torch.float64 else 32
    prefix, rank = 0, wanted
    for shift in range(width - _BITS_PER_PASS, -1, -_BITS_PER_PASS):
        histogram = torch.zeros(1 << _BITS_PER_PASS, dtype=torch.int64)
        for _, delta in deltas():
            bits = _magnitude_bits(delta)
            if shift + _BITS_PER_PASS < width:
                bits = bits[(bits >> (shift + _BITS_PER_PASS)) == prefix]
            histogram += torch.bincount((bits >> shift) & ((1 << _BITS_PER_PASS) - 1), minlength=1 << _BITS_PER_PASS)
        from_top = histogram.flip(0).cumsum(0)
        place = int((from_top >= rank).nonzero()[0])
        rank -= int(from_top[place - 1]) if place else 0
        prefix = (prefix << _BITS_PER_PASS) | ((1 << _BITS_PER_PASS) - 1 - place)
    return prefix


def _magnitude_bits(delta: Tensor) -> Tensor:
    """Return the magnitudes as integers [n] in the same order."""
    flat = delta.abs().reshape(-1)
    return flat.view(torch.int64) if flat.dtype == torch.float64 else flat.float().view(torch.int32).long()
