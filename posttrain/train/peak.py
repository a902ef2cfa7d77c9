"""What a step took of the GPU's memory, as torch's allocator counts it."""

from __future__ import annotations

import torch

from posttrain.train.memory import GIB


def peak_memory() -> dict[str, float]:
    """`memory/allocated_gib` and `memory/reserved_gib`: the most since the last call. Empty without a GPU.

    A colocated engine counts as well. Reserved is what the allocator holds: far above allocated, memory is in pieces of
    sizes that are not asked for again.
    """
    if not torch.cuda.is_available():
        return {}
    found = {
        "memory/allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return found
