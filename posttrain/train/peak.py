"""Peak GPU memory of a step, as counted by torch's allocator."""

from __future__ import annotations

import torch

from posttrain.train.memory import GIB


def peak_memory() -> dict[str, float]:
    """Return `memory/allocated_gib` and `memory/reserved_gib`, the peaks since the last call; {} without a GPU.

    Includes a colocated engine. Reserved is what the allocator holds: if it is far above allocated, memory is
    fragmented into blocks of sizes that are not requested again.
    """
    if not torch.cuda.is_available():
        return {}
    found = {
        "memory/allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return found
