"""Pairs of tasks that an agent solved with guidance only (Agent-RLVR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Attempts = Sequence[Sequence[bool | float | None]]  # by task; None = not judged
Source = Literal["guided", "first"]


class GuidedPair(NamedTuple):
    """A guided attempt that passed over an attempt at the same task that failed."""

    task: int
    chosen_source: Source
    chosen: int
    rejected_source: Source
    rejected: int


def guided_pairs(first_pass: Attempts, guided_pass: Attempts) -> list[GuidedPair]:
    """Guided wins in order with losses, guided ones first, then those of first attempts; each is used once.

    A task without a guided win, or without a loss, has no pair; wins that are left over are not used. The order is a
    guess: the paper does not state it.
    """
    found = []
    for task, (first, guided) in enumerate(zip(first_pass, guided_pass, strict=True)):
        wins = [n for n, ok in enumerate(guided) if ok]
        losses: list[tuple[Source, int]] = [("guided", n) for n, ok in enumerate(guided) if ok is not None and not ok]
        losses += [("first", n) for n, ok in enumerate(first) if ok is not None and not ok]
        found += [GuidedPair(task, "guided", win, *loss) for win, loss in zip(wins, losses, strict=False)]
    return found
