"""What a killed process leaves in /dev/shm is found while it lives, and removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.rollout import named_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")

HOLDS = """
import sys
from multiprocessing.shared_memory import SharedMemory
mine = SharedMemory(create=True, size=4096)
print(mine.name, flush=True)
sys.stdin.read()
"""


def test_segments_of_a_killed_group_are_removed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        segment = Path("/dev/shm", holder.stdout.readline().strip())
        try:
            assert segment.exists() and named_memory.of_group(holder.pid) == {segment}
            assert segment not in named_memory.mapped([1 << 30])  # no such process
            named_memory.remove([segment, segment])
            assert not segment.exists()
            assert named_memory.of_group(holder.pid) == set(), "it is unlinked already"
        finally:
            holder.kill()
