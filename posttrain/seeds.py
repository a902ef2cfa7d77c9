"""Random seeds and the order of prompts as pure functions of the run's seed: resuming needs no generator state."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from dataclasses import dataclass

from posttrain.errors import DataError


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for one purpose, the same on every machine: `derive(0, "order", epoch)`.

    A hash of all parts: neighboring seeds or steps are unrelated (`seed + step` would make seed 1 a shifted seed 0).
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class PromptSampler:
    """An endless stream of item indices: each item once per epoch, in an order shuffled by (seed, epoch).

    n_items: size of the data set. per_step: indices per step. shuffle: False keeps the data's own order in every epoch.
    """

    n_items: int
    per_step: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.n_items < 1:
            raise DataError("there are no rows to sample from")
        if self.per_step < 1:
            raise ValueError(f"per_step must be positive, not {self.per_step}")

    def step(self, step: int) -> list[int]:
        """Return the per_step indices of a step (steps count from 0)."""
        return self.take(step * self.per_step, self.per_step)

    def take(self, start: int, count: int) -> list[int]:
        """Return `count` indices of the endless stream from position `start`, for refills beyond a step's indices."""
        positions = [divmod(position, self.n_items) for position in range(start, start + count)]
        if not self.shuffle:
            return [offset for _, offset in positions]
        return [_order(self.n_items, self.seed, epoch)[offset] for epoch, offset in positions]


@functools.lru_cache(maxsize=4)
def _order(n_items: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the shuffled order of an epoch."""
    order = list(range(n_items))
    random.Random(derive(seed, "order", epoch)).shuffle(order)
    return tuple(order)
