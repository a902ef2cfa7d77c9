"""What the training loop and a kind of replay say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A rollout, fresh or stored.

    uid: of its prompt. step: that it was sampled for, from 0. group: number of its group in that step. reward, correct:
    None = unscored. length: tokens of the completion. advantage: the mean over its tokens, as assigned within its own
    group; 0 before that, and where the step does not train on it. left_out: its advantage where `select` has taken
    every token of it, else 0.
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
    """The step that asks, from 0; the steps of the run; a seed for random draws."""

    step: int
    total_steps: int
    seed: int

    def age(self, row: Row) -> int:
        """Steps since the row was sampled."""
        return self.step - row.step


@dataclass(frozen=True)
class Stock:
    """What is stored after a step: places of stored rows that stay, then places of fresh rows that join them."""

    stay: Sequence[int]
    join: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The base of kinds: nothing is stored, and nothing replayed.

    All methods are pure: the same arguments give the same answer, on every rank and after a resume. Stored rows come in
    the order in which they were stored.
    """

    def replace(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Mapping[int, int]:
        """Place of a fresh row that gives way -> place of the stored one that stands in its group instead."""
        del fresh, stored, request
        return {}

    def add(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Sequence[int]:
        """Places of stored rows that the step trains on beside its own, with the advantages that they were stored with.
        fresh: the step's rows with their advantages."""
        del fresh, stored, request
        return ()

    def train_apart(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Sequence[int]:
        """Places of stored rows that are trained on in an update of their own, behind those of the step, with the
        advantages that they were stored with. fresh: the step's rows with their advantages."""
        del fresh, stored, request
        return ()

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        """What is stored after the step. fresh: its rows, without those that gave way and those that were replayed."""
        del fresh, request
        return Stock(range(len(stored)), ())
