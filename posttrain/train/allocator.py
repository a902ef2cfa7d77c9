"""How torch's allocator takes a GPU's memory: in segments that grow, so that no piece is left over of a size that does
not come again."""

from __future__ import annotations

import os

import torch

from posttrain.rollout.weight_transfer import set_allocator

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PROBE_BYTES = 1 << 22


def use_growing_segments(device: torch.device) -> bool:
    """Have all later allocations of this process on a GPU use torch's expandable segments; returns whether they do.

    Segments of fixed sizes stay reserved where micro-batches differ in size. Settings that the user made in the
    environment stay, and so does the default where the driver cannot map memory. What another process is to map is
    allocated apart from them: `rollout.weight_transfer.plain_segments`.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        return False
    set_allocator("expandable_segments:True")
    try:
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of the driver, which some sandboxes do not pass on whole
        set_allocator("expandable_segments:False")
        return False
    return True
