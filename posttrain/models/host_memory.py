"""Tensors that wait in the host's memory for a GPU: pinned, so that they are copied at the full speed of the bus."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 1 << 28  # bytes, a power of two
ALIGNED = 64  # bytes, for every type


class HostMemory:
    """Memory of the host, given out tensor by tensor from pieces of `size` bytes, or of their own for larger ones.

    Torch rounds pinned memory up to a power of two: a piece for each tensor would take up to twice as much.
    """

    def __init__(self, *, pinned: bool, size: int = PIECE) -> None:
        self.pinned, self.size = pinned, size
        self.left = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor without values."""
        count = shape.numel() * dtype.itemsize
        if count > len(self.left):
            self.left = torch.empty(max(self.size, count), dtype=torch.uint8, pin_memory=self.pinned)
        found = self.left[:count].view(dtype).view(shape)
        self.left = self.left[count + -count % ALIGNED :]
        return found


def in_pieces(tensors: Iterable[Tensor], *, pinned: bool, size: int = PIECE) -> list[Tensor]:
    """Copies of the tensors in `HostMemory`."""
    memory = HostMemory(pinned=pinned, size=size)
    return [memory.take(tensor.shape, tensor.dtype).copy_(tensor) for tensor in tensors]
