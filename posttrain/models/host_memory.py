"""Weights that wait in the host's memory for a GPU: pinned, so that they are copied at the full speed of the bus."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 1 << 28  # bytes, a power of two
ALIGNED = 64  # bytes, for every type


def in_pieces(tensors: Iterable[Tensor], *, pinned: bool, size: int = PIECE) -> list[Tensor]:
    """Copies of the tensors, packed into pieces of memory of `size` bytes, or of their own where they are larger.

    Torch rounds pinned memory up to a power of two: a piece for each tensor would take up to twice as much.
    """
    found, left = [], torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        if tensor.nbytes > len(left):
            left = torch.empty(max(size, tensor.nbytes), dtype=torch.uint8, pin_memory=pinned)
        place = left[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        found.append(place.copy_(tensor))
        left = left[tensor.nbytes + -tensor.nbytes % ALIGNED :]
    return found
