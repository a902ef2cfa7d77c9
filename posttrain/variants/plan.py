"""What a kind of prompt variants is asked and what it answers. `train/variants.py` asks, renders and samples.

A kind is a function `(asked, **its keys) -> list of variants`. It is asked again after every round, with what the
rollouts so far have earned, until it answers with an empty list. One that learns from step to step is a class instead:
its keys are fields, `plan(asked)` is the function, and `learn(memory, outcomes)` gives the JSON-able state that comes
back as `asked.memory` in later steps and is kept in checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from posttrain.batch import Variant

MAX_ROUNDS = 32  # of one prompt in one step


@dataclass(frozen=True)
class Outcome:
    """The rollouts of one variant of a prompt, scored: one entry a rollout; None = unscored, or nobody knows."""

    uid: str
    variant: Variant
    rewards: tuple[float | None, ...]
    correct: tuple[bool | None, ...]
    texts: tuple[str, ...]
    question: str = ""  # the prompt's own text

    @property
    def solved(self) -> bool:
        """Whether any rollout was right."""
        return any(self.correct)

    @property
    def mean_reward(self) -> float | None:
        """Over the scored rollouts; None without one."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None

    @property
    def accuracy(self) -> float | None:
        """Share of right ones among those that are known; None without one."""
        known = [one for one in self.correct if one is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Asked:
    """One prompt in one step.

    question: the prompt's own text (its last user message). row: all columns of the data. solution: tokens of its
    solution, () = it has none. decode: tokens to text. encode: text to tokens. rounds: the outcomes of the variants
    so far in this step, in order. step: finished steps of the run. seed: of everything random about this prompt in this
    step. memory: what `learn` returned behind an earlier step, None = nothing yet.
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
        """The same numbers whenever this prompt is planned in this step."""
        return random.Random(self.seed)


class Planner(Protocol):
    """A kind with its keys bound."""

    def plan(self, asked: Asked) -> list[Variant]:
        """The variants of the next round, each sampled `rollout.group_size` times; [] = no further round."""
        ...

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> Any:
        """The state behind a step: a function of the state before it and of all that the step trains on."""
        ...


@dataclass(frozen=True)
class Stateless:
    """The planner of a plain function."""

    function: Callable[..., list[Variant]]
    params: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, asked: Asked) -> list[Variant]:
        """See `Planner.plan`."""
        return self.function(asked, **self.params)

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> Any:
        """Nothing is learnt."""
        del outcomes
        return memory
