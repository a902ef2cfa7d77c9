"""Replay kinds that add stored rows to a step, with the advantages from their original groups."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.curriculum.selection import draw_weighted
from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.replay.protocol import TAU, Replay, Request, Row, Stock


@register(
    "replay",
    "ssb",
    paper="2504.16656",
    needs=("adds_rows",),
    note="Reconstructed: no code was released. Ages, capacity and the power are guesses.",
)
@dataclass(frozen=True, kw_only=True)
class SelectiveSampleBuffer(Replay):
    """Skywork R1V2's selective sample buffer: stored rows with a nonzero advantage make up for rows without one.

    Rows with a nonzero advantage are stored for max_age steps, at most `capacity`: the youngest, then the largest |A|.
    A step gets one stored row for each of its rows with advantage 0, at most `fraction` of its rows, sampled in
    proportion to |A|^power without replacement.
    """

    max_age: int = 2
    capacity: int = 1024
    power: float = 1.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        _check_at_least_one("max_age", self.max_age)
        _check_at_least_one("capacity", self.capacity)
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction {self.fraction}", allowed="more than 0, at most 1")

    def add(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> list[int]:
        empty = sum(abs(row.advantage) <= TAU for row in fresh)
        weights = self._buffer(stored, request)[1]
        most = math.floor(self.fraction * len(fresh) + 1e-9)  # 0.7 * 90 is 62.99999999999999
        count = min(empty, most, sum(weight > 0 for weight in weights))
        return sorted(draw_weighted(weights, count, random.Random(request.seed).random))

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        kept = self._buffer([*stored, *fresh], request)[0]
        return Stock(
            [n for n in range(len(stored)) if kept[n]], [n for n in range(len(fresh)) if kept[len(stored) + n]]
        )

    def _buffer(self, rows: Sequence[Row], request: Request) -> tuple[list[float], list[float]]:
        ages = [request.age(row) for row in rows]
        return selective_buffer(
            [row.advantage for row in rows], ages, max_age=self.max_age, capacity=self.capacity, power=self.power
        )


@register(
    "replay",
    "recent",
    paper="2507.06892",
    needs=("adds_rows",),
    note="Read through a write-up. Older rows come on top of the fresh ones: the paper samples fewer instead.",
)
@dataclass(frozen=True, kw_only=True)
class Recent(Replay):
    """ReMix: until step `until`, `fraction` of a step's rows are sampled uniformly from the last `window` steps.

    With n fresh rows, floor(n * fraction / (1 - fraction)) stored rows are added, or all if there are fewer. until: the
    step (from 1) from which on none is added; null = never.
    """

    fraction: float = 0.4
    window: int = 2
    until: int | None = None

    def __post_init__(self) -> None:
        _check_at_least_one("window", self.window)
        if not 0 < self.fraction < 1:
            raise UserError(f"fraction {self.fraction}", allowed="between 0 and 1")
        if self.until is not None:
            _check_at_least_one("until", self.until)

    def add(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> list[int]:
        able = [n for n, row in enumerate(stored) if request.age(row) <= self.window]
        if self.until is not None and request.step + 1 >= self.until:
            return []
        count = int(len(fresh) * self.fraction / (1 - self.fraction) + 1e-9)
        return sorted(random.Random(request.seed).sample(able, min(count, len(able))))

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        if self.until is not None and request.step + 2 >= self.until:
            return Stock((), ())
        return Stock([n for n, row in enumerate(stored) if request.age(row) < self.window], range(len(fresh)))


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} {value}", allowed="1 or more")


def selective_buffer(
    advantages: Sequence[float],
    ages: Sequence[float],
    *,
    tau: float = TAU,
    max_age: float = 2,
    capacity: int | None = None,
    power: float = 1.0,
) -> tuple[list[float], list[float]]:
    """Return (0/1 mask of the rows that stay, sampling probability of each row). Rows with |advantage| > tau and age <=
    max_age stay; of more than `capacity`, the youngest, then the largest |advantage|, then the first. The probability
    is proportional to |advantage|^power."""
    able = [n for n, (a, age) in enumerate(zip(advantages, ages, strict=True)) if abs(a) > tau and age <= max_age]
    able = sorted(able, key=lambda n: (ages[n], -abs(advantages[n]), n))[:capacity]
    kept = [float(n in set(able)) for n in range(len(advantages))]
    weights = [ok * abs(a) ** power for ok, a in zip(kept, advantages, strict=True)]
    return kept, [weight / sum(weights) if able else 0.0 for weight in weights]
