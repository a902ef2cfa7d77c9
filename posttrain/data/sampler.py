"""Which items a step takes: a pure function of seed and step, so that resuming needs a number and no state."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from posttrain.errors import DataError
from posttrain.seeds import derive


@dataclass(frozen=True)
class PromptSampler:
    """An endless stream of item indices: each item once an epoch, in an order drawn from (seed, epoch).

    n_items: items of the data set. per_step: indices a step. shuffle: False keeps the data's own order in every epoch.
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
        """The per_step indices of a step (steps count from 0)."""
        return self.take(step * self.per_step, self.per_step)

    def take(self, start: int, count: int) -> list[int]:
        """`count` indices of the endless stream from position `start` on; for refills that draw beyond a step."""
        places = [divmod(position, self.n_items) for position in range(start, start + count)]
        if not self.shuffle:
            return [place for _, place in places]
        return [_order(self.n_items, self.seed, epoch)[place] for epoch, place in places]


@functools.lru_cache(maxsize=4)
def _order(n_items: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n_items))
    random.Random(derive(seed, "order", epoch)).shuffle(order)
    return tuple(order)
