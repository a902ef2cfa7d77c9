"""Tensors that wait in the host's memory for a GPU: pinned, so that they are copied at the full speed of the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 28  # bytes, a power of two
ALIGNED = 64  # bytes, for every type
USED = 0.9  # of a piece; a fuller one is saved as it is


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


def copy_from_pieces(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """An optimiser's `state` to save: `torch.save` writes whole storages, so tensors in a piece of memory of which they
    use less than USED are copied out of it."""
    tensors = [value for values in state.values() for value in values.values() if isinstance(value, Tensor)]
    used = Counter[int]()
    for tensor in tensors:
        used[_storage(tensor)] += tensor.nbytes
    sparse = {_storage(t) for t in tensors if used[_storage(t)] < USED * t.untyped_storage().nbytes()}
    return {
        number: {
            key: value.clone() if isinstance(value, Tensor) and _storage(value) in sparse else value
            for key, value in values.items()
        }
        for number, values in state.items()
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def in_pieces(tensors: Iterable[Tensor], *, pinned: bool, size: int = PIECE) -> list[Tensor]:
    """Copies of the tensors in `HostMemory`."""
    memory = HostMemory(pinned=pinned, size=size)
    return [memory.take(tensor.shape, tensor.dtype).copy_(tensor) for tensor in tensors]
