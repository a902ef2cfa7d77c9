"""Preference pairs from tasks that an agent solves only with guidance (Agent-RLVR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Attempts = Sequence[Sequence[bool | float | None]]  # outcomes of the attempts at each task; None = not judged
Source = Literal["guided", "first"]


class GuidedPair(NamedTuple):
    """A passed guided attempt (chosen) and a failed attempt at the same task (rejected), by task and attempt index."""

    task: int
    chosen_source: Source
    chosen: int
    rejected_source: Source
    rejected: int


def guided_pairs(first_pass: Attempts, guided_pass: Attempts) -> list[GuidedPair]:
    """Pair passed guided attempts in order with failed ones: failed guided attempts first, then failed first attempts.

    Each attempt is used once. A task without a passed guided attempt or without a failure yields no pair; surplus
    passes are not used. The order is this project's guess: the paper does not state it.
    """
    found = []
    for task, (first, guided) in enumerate(zip(first_pass, guided_pass, strict=True)):
        wins = [n for n, ok in enumerate(guided) if ok]
        failures: list[tuple[Source, int]] = [("guided", n) for n, ok in enumerate(guided) if ok is not None and not ok]
        failures += [("first", n) for n, ok in enumerate(first) if ok is not None and not ok]
        found += [GuidedPair(task, "guided", win, *failure) for win, failure in zip(wins, failures, strict=False)]
    return found
