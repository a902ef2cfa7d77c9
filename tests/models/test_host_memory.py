"""Copies in a few host memory buffers."""

from __future__ import annotations

import torch

from posttrain.models.host_memory import copy_to_host


def test_buffers_hold_tensors_of_all_types() -> None:
    """Seven bytes and a scalar between others, one larger than a buffer, an empty one."""
    named = {
        "odd": torch.arange(7, dtype=torch.int8),
        "half": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "large": torch.randn(100),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 6).T,
    }
    found = dict(zip(named, copy_to_host(named.values(), size=192, pinned=False), strict=True))
    assert all(torch.equal(found[name], named[name]) for name in named)
    assert all(tensor.dtype == named[name].dtype and tensor.data_ptr() % 64 == 0 for name, tensor in found.items())
    assert len({found[name].untyped_storage().data_ptr() for name in ("odd", "half", "scalar")}) == 1
