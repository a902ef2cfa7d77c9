"""Interface of prompt variants. `train/variants.py` calls a kind, renders its variants and samples from them.

A kind is a function `(asked, **its keys) -> list of variants`. It is called again after every round, with the outcomes
of the rounds so far, until it returns an empty list. A kind that learns from step to step is a class instead: its keys
are the arguments of `__init__`, `plan(asked)` is the function, and `learn(memory, outcomes)` returns JSON values that
are passed back as `asked.memory` in later steps and saved in checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from posttrain.batch import Variant

MAX_ROUNDS = 32  # for one prompt in one step


@dataclass(frozen=True)
class Outcome:
    """Scored rollouts of one variant of a prompt: one entry per rollout; None = unscored or unknown."""

    uid: str
    variant: Variant
    rewards: tuple[float | None, ...]
    correct: tuple[bool | None, ...]
    texts: tuple[str, ...]
    question: str = ""  # the prompt's own text

    @property
    def is_solved(self) -> bool:
        """Whether any rollout was correct."""
        return any(self.correct)

    @property
    def mean_reward(self) -> float | None:
        """Mean over the scored rollouts; None if there is none."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None

    @property
    def accuracy(self) -> float | None:
        """Share of correct rollouts among the judged ones; None if none was judged."""
        known = [is_correct for is_correct in self.correct if is_correct is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Asked:
    """One prompt in one step, to be planned.

    question: text of the prompt (its last user message). row: all columns of the data. solution: tokens of the row's
    solution, () = none. decode: tokens to text. encode: text to tokens. rounds: outcomes of the variants so far in this
    step, in order. step: finished steps of the run. seed: for everything random about this prompt in this step. memory:
    what `learn` returned after an earlier step, None = nothing yet.
    """

    uid: str
    question: str
    row: Mapping[str, Any]
    solution: tuple[int, ...] = ()
    decode: Callable[[Sequence[int]], str] = str
    encode: Callable[[str], tuple[int, ...]] = lambda _: ()
    rounds: tuple[Outcome, ...] = ()
    step: int = 0
    seed: int = 0
    memory: Any = field(default=None)

    def random(self) -> random.Random:
        """Return a generator with the same numbers whenever this prompt is planned in this step."""
        return random.Random(self.seed)


class Planner(Protocol):
    """A kind of prompt variants with its keys bound."""

    def plan(self, asked: Asked) -> list[Variant]:
        """Return the variants of the next round, each sampled `rollout.group_size` times; [] = no further round."""
        ...

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> Any:
        """Return the state after a step, a function of the previous state and of all that the step trains on."""
        ...


@dataclass(frozen=True)
class Stateless:
    """Planner that wraps a plain function."""

    function: Callable[..., list[Variant]]
    params: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, asked: Asked) -> list[Variant]:
        """See `Planner.plan`."""
        return self.function(asked, **self.params)

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> Any:
        """Return the memory unchanged."""
        del outcomes
        return memory
