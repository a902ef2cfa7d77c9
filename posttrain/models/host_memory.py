"""Pinned host memory for tensors that are copied to a GPU at the full speed of the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 28  # a power of two
ALIGNMENT = 64  # bytes, enough for every type
FULL_SHARE = 0.9  # a block with at least this share in use is saved without copying its tensors


class HostMemory:
    """Allocator of host tensors from blocks of `size` bytes; a larger tensor gets a block of its own.

    Torch rounds pinned memory up to a power of two: a separate allocation per tensor would take up to twice as much.
    """

    def __init__(self, *, pinned: bool, size: int = BLOCK_BYTES) -> None:
        self.pinned, self.size = pinned, size
        self.free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        count = shape.numel() * dtype.itemsize
        if count > len(self.free):
            self.free = torch.empty(max(self.size, count), dtype=torch.uint8, pin_memory=self.pinned)
        found = self.free[:count].view(dtype).view(shape)
        self.free = self.free[count + -count % ALIGNMENT :]
        return found


def compact_state(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return an optimizer's `state` with the tensors of sparsely used blocks copied out of them, for saving.

    `torch.save` writes whole storages, so tensors in a block of which they use less than FULL_SHARE are copied.
    """
    tensors = [value for values in state.values() for value in values.values() if isinstance(value, Tensor)]
    used = Counter[int]()
    for tensor in tensors:
        used[_storage_id(tensor)] += tensor.nbytes
    sparse = {_storage_id(t) for t in tensors if used[_storage_id(t)] < FULL_SHARE * t.untyped_storage().nbytes()}
    return {
        number: {
            key: value.clone() if isinstance(value, Tensor) and _storage_id(value) in sparse else value
            for key, value in values.items()
        }
        for number, values in state.items()
    }


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copy_to_host(tensors: Iterable[Tensor], *, pinned: bool, size: int = BLOCK_BYTES) -> list[Tensor]:
    """Return copies of the tensors in `HostMemory`."""
    memory = HostMemory(pinned=pinned, size=size)
    return [memory.take(tensor.shape, tensor.dtype).copy_(tensor) for tensor in tensors]
