"""Setup of torch's CUDA caching allocator: expandable segments, against fragmentation by micro-batches of varying
size."""

from __future__ import annotations

import os

import torch

from posttrain.rollout.weight_transfer import set_allocator

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PROBE_BYTES = 1 << 22


def use_expandable_segments(device: torch.device) -> bool:
    """Make all later GPU allocations of this process use torch's expandable segments; return whether they do.

    Segments of fixed sizes stay reserved when micro-batches differ in size. Settings from the user's environment are
    kept, and so is the default if the driver cannot map memory. Memory to be mapped by another process is allocated
    from regular segments: `rollout.weight_transfer.plain_segments`.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        return False
    set_allocator("expandable_segments:True")
    try:
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # from the driver: some sandboxes do not expose it fully
        set_allocator("expandable_segments:False")
        return False
    return True
