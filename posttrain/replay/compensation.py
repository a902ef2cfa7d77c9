"""Replay of rows that `select` excluded from a step, in a separate update later (RoRecomp)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.control.stages import Cosine
from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.replay.protocol import TAU, Replay, Request, Row, Stock


@register(
    "replay",
    "compensation",
    paper="2509.25958",
    needs=("trains_apart",),
    note="Reconstructed from the abstract and a review: size, schedule and what becomes of a batch that is not drawn.",
)
@dataclass(frozen=True, kw_only=True)
class Compensation(Replay):
    """RoRecomp's compensation batches: rows that `select` excluded are trained on later, in a separate update.

    Rows with a nonzero advantage whose tokens `select` excluded altogether are stored in order. Once there are `size`
    of them (null: the number of rows of a step), the oldest `size` leave the store after the next step's own updates:
    with probability p_end + (p_start - p_end) * (1 + cos(pi * step / steps)) / 2 they are trained on, else dropped.
    max_age: steps after which a row is dropped earlier; null = never.
    """

    size: int | None = None
    p_start: float = 1.0
    p_end: float = 0.0
    max_age: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("size", self.size), ("max_age", self.max_age)):
            if number is not None and number < 1:
                raise UserError(f"{name} {number}", allowed="1 or more, or null")
        for name, share in (("p_start", self.p_start), ("p_end", self.p_end)):
            if not 0 <= share <= 1:
                raise UserError(f"{name} {share}", allowed="0 to 1")

    def probability(self, step: int, total_steps: int) -> float:
        """Return the probability that a full batch is trained on after step `step`, from 0."""
        return Cosine(total_steps=total_steps, high=self.p_start, low=self.p_end).value({}, step)

    def train_apart(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> list[int]:
        full = self._full_batch(len(fresh), stored, request)
        drawn = random.Random(request.seed).random() < self.probability(request.step, request.total_steps)
        return full if drawn else []

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        gone = set(self._full_batch(len(fresh), stored, request))
        stay = [n for n in self._select_young(stored, request) if n not in gone]
        return Stock(stay, [n for n, row in enumerate(fresh) if abs(row.left_out) > TAU])

    def _select_young(self, stored: Sequence[Row], request: Request) -> list[int]:
        return [n for n, row in enumerate(stored) if self.max_age is None or request.age(row) <= self.max_age]

    def _full_batch(self, rows: int, stored: Sequence[Row], request: Request) -> list[int]:
        young, size = self._select_young(stored, request), self.size or rows
        return young[:size] if len(young) >= size else []
