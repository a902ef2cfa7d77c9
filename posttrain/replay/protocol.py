"""Interface between the training loop and a kind of replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TAU = 1e-6  # advantages up to this size count as zero


@dataclass(frozen=True)
class Row:
    """A rollout, fresh or stored.

    uid: of its prompt. step: the step that it was sampled for, from 0. group: id of its group in that step. reward,
    correct: None = unscored. length: completion tokens. advantage: mean over its tokens, as assigned within its own
    group; 0 before it is assigned, and if the step does not train on the row. left_out: the row's advantage if `select`
    excluded all of its tokens, else 0.
    """

    uid: str
    step: int
    group: int
    reward: float | None
    correct: float | None
    length: int
    advantage: float = 0.0
    left_out: float = 0.0


@dataclass(frozen=True)
class Request:
    """The current step, from 0; the number of steps of the run; a seed for random draws."""

    step: int
    total_steps: int
    seed: int

    def age(self, row: Row) -> int:
        """Return the number of steps since the row was sampled."""
        return self.step - row.step


@dataclass(frozen=True)
class Stock:
    """The store after a step: indices of stored rows that stay, then indices of fresh rows that are added."""

    stay: Sequence[int]
    join: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Base class of replay kinds: stores and replays nothing.

    All methods are pure: equal arguments give equal results, on every rank and after a resume. Stored rows are passed
    in the order in which they were stored.
    """

    def replace(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Mapping[int, int]:
        """Return index of a fresh row -> index of the stored row that replaces it in its group."""
        del fresh, stored, request
        return {}

    def add(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Sequence[int]:
        """Return indices of stored rows that the step trains on in addition to its own, with their stored advantages.
        fresh: the step's rows with their advantages."""
        del fresh, stored, request
        return ()

    def train_apart(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Sequence[int]:
        """Return indices of stored rows that are trained on in a separate update after the step's own updates, with
        their stored advantages. fresh: the step's rows with their advantages."""
        del fresh, stored, request
        return ()

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        """Return the store after the step. fresh: the step's rows, without replaced and replayed ones."""
        del fresh, request
        return Stock(range(len(stored)), ())
