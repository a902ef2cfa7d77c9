"""A buffer of prompts that RL could not solve, newest first, consumed by supervised steps on their solutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def has_failed(rewards: Sequence[float | None], fail_value: float = 0.0) -> bool:
    """Return whether a prompt goes into the buffer: all of its rewards equal `fail_value` (well formed but wrong).

    A group with any other reward, such as that of a format failure, does not.
    """
    return bool(rewards) and all(reward == fail_value for reward in rewards)


def with_newest(buffer: Sequence[T], newest: Sequence[T], same: Sequence[T] = ()) -> list[T]:
    """Return the buffer with the step's new entries in front, in batch order. same: older entries that they replace."""
    return [*newest, *(entry for entry in buffer if entry not in same)]


def take_batch(buffer: Sequence[T], size: int = 128) -> tuple[list[T], list[T]]:
    """Return (first `size` entries, remaining entries); the batch is empty if there are fewer, or for size < 1."""
    count = size if len(buffer) >= size > 0 else 0
    return list(buffer[:count]), list(buffer[count:])
