"""Interface between the training loop and a prompt sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

State = dict[str, Any]


@dataclass(frozen=True)
class Pool:
    """All prompts of the run, by number: their uids (stable across runs) and data rows; and the recipe's prompts per
    step, rollouts per prompt, seed, and number of steps."""

    uids: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    prompts_per_step: int = 1
    group_size: int = 1
    seed: int = 0
    steps: int = 1

    def __len__(self) -> int:
        return len(self.uids)


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt in one step, as a sampler sees them.

    rewards and correct: one entry per rollout, None = unscored. bin: the prompt's entry of `Plan.bins`. measured:
    sampled to measure the prompt, not to train on. kept: some of its rows stayed in the step (after `keep`). loss: mean
    policy loss of its rows in the update; kl: mean over its tokens of the KL to the reference; both None if they were
    not computed.
    """

    prompt: int
    uid: str
    rewards: tuple[float | None, ...]
    correct: tuple[float | None, ...]
    bin: int | None = None
    measured: bool = False
    kept: bool = True
    loss: float | None = None
    kl: float | None = None
    group: int = 0  # number of the group within its step
    lengths: tuple[int, ...] = ()  # tokens of each rollout, replies included

    @property
    def pass_rate(self) -> float | None:
        """Share of correct answers among the judged rollouts; None if none was judged."""
        known = [value for value in self.correct if value is not None]
        return sum(known) / len(known) if known else None

    @property
    def mean_reward(self) -> float | None:
        """Mean of the known rewards; None if no rollout was scored."""
        known = [value for value in self.rewards if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Request:
    """Request for the prompts of a step.

    step: the step that trains on the rollouts, from 0. total_steps: steps of the run. prompts: number to draw.
    group_size: rollouts per prompt in this step. stream: the next `Sampler.places` prompts of the uniform order. seed:
    for random draws. round: how often the request was made before, 0 = first time. taken: prompts that the step
    already has (when it draws again for groups that `keep` dropped). seen: groups of the previous plan, if that plan
    asked for another round. max_new_tokens: limit of a rollout in this step. values: predicted pass rate of each prompt
    in `stream`, for samplers that need `values`."""

    step: int
    total_steps: int
    prompts: int
    group_size: int
    stream: Sequence[int]
    seed: int
    round: int = 0
    max_new_tokens: int = 0
    taken: Sequence[int] = ()
    seen: Sequence[Group] = ()
    values: Sequence[float] = ()


@dataclass(frozen=True)
class Plan:
    """Prompts by number, and the number of rollouts of each. A prompt that is listed twice gets two groups.

    limits: maximum tokens of each prompt's rollouts, all turns and replies included; () = rollout.max_new_tokens. bins:
    one number per prompt, e.g. its difficulty, for components that read `bins`. again: call `propose` once more with
    the rewards of these rollouts in `Request.seen`; the next plan lists the same prompts, and its rollouts join their
    groups. measure: sample one greedy rollout each, scored but not trained on; the next plan may list any prompts. No
    prompts at all: the request is repeated with the next prompts of the uniform order."""

    prompts: Sequence[int]
    rollouts: Sequence[int]
    bins: Sequence[int] = ()
    limits: Sequence[int] = ()
    again: bool = False
    measure: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Base class of samplers, without state."""

    def start(self, pool: Pool) -> State:
        """Return the state before the first step: JSON values with string keys."""
        del pool
        return {}

    def places(self, prompts: int) -> int:
        """Return how many prompts of the uniform order a request for this many prompts consumes."""
        return prompts

    @abstractmethod
    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        """Choose the prompts of a step. Pure: equal arguments give equal plans, on every rank and after a resume."""

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        """Return the state after a step (from 0) with these groups, including groups that `keep` dropped and measured
        groups. planned: the first step planned from the new state, step + 1 + `rollout.staleness`."""
        del groups, pool, step, planned
        return state

    def metrics(self, state: State) -> dict[str, float]:
        """Return numbers of the state, logged as `sampler/NAME`."""
        del state
        return {}

    def notes(self, pool: Pool) -> list[str]:
        """Return warnings about the prompts, one sentence each, that a run prints before the first step."""
        del pool
        return []

    def most(self, prompts: int, group_size: int) -> tuple[int, int]:
        """Return upper bounds (rows of a step, rollouts of one prompt), for memory estimates."""
        return prompts * group_size, group_size
