"""Named shared memory of vLLM's worker processes, which nobody would remove when they are killed.

A vLLM of several processes (tensor parallelism) has segments in /dev/shm, hundreds of megabytes of them, that its
workers unlink at the end of an orderly life. An engine's process leaves at once, so whoever ends it removes what it
had. Which segments these are says /proc; where there is none, nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

KINDS = ("psm_", "sem.mp-", "vllm_dist_")  # of Python's multiprocessing, and of vLLM's workers on a CPU


def of_group(group: int) -> set[Path]:
    """The segments that processes of a process group have mapped. Ask while they live, `remove` when they are dead."""
    return mapped(process for process in _processes() if _group_of(process) == group)


def mapped(processes: Iterable[int]) -> set[Path]:
    """The segments of our kinds that any of the processes has mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                name = line.partition("/dev/shm/")[2]
                if name.startswith(KINDS) and not name.endswith(" (deleted)"):
                    found.add(Path("/dev/shm", name))
    return found


def remove(segments: Iterable[Path]) -> None:
    """Unlink them, where they are still there. Whoever has one mapped keeps it."""
    for path in segments:
        with contextlib.suppress(OSError):
            path.unlink()


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _group_of(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except OSError:
        return None
