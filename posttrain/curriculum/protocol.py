"""What the training loop and a prompt sampler say to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

State = dict[str, Any]


@dataclass(frozen=True)
class Pool:
    """The prompts that there are, by number: their uids, which are stable across runs, and their data rows; and the
    recipe's prompts a step, rollouts of a prompt, seed, and steps of the run."""

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

    rewards and correct: one entry a rollout, None = unscored. bin: what the sampler put into `Plan.bins`. measured:
    sampled to measure the prompt, not to be trained on. kept: some of its rows stayed in the step (after `keep`).
    loss: mean of its rows' policy losses in the update; kl: mean over its tokens of the KL to the reference; both None
    where they were not computed.
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
        """Share of right answers among those that were judged; None if none was."""
        known = [value for value in self.correct if value is not None]
        return sum(known) / len(known) if known else None

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards that there are; None if there is none."""
        known = [value for value in self.rewards if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Request:
    """What a step needs.

    step: that trains on the rollouts, from 0. total_steps: of the run. prompts: how many it draws. group_size: rollouts
    of a prompt in this step. stream: the next prompts of the uniform order, `Sampler.places` of them. seed: of random
    draws. round: how often the request was made before, 0 = the first time. taken: prompts that the step has already
    (it draws again for groups that `keep` dropped). seen: the groups of the plan before, where it asked for another
    round. max_new_tokens: of a rollout in this step. values: predicted pass rate of each prompt in `stream`, for
    samplers that need `values`."""

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
    """Prompts by number, and the rollouts of each. A prompt may be named twice: its groups are then two.

    limits: most tokens of each prompt's rollouts, all turns and replies; () = rollout.max_new_tokens. bins: a number a
    prompt for components that read `bins`, e.g. of its difficulty. again: `propose` is called once more with the
    rewards of these rollouts in `Request.seen`; the next plan names the same prompts, and its rollouts join their
    groups. measure: one greedy rollout each, scored and not trained on; the next plan may name any prompts. No prompts
    at all: the request is made again with the next prompts of the uniform order."""

    prompts: Sequence[int]
    rollouts: Sequence[int]
    bins: Sequence[int] = ()
    limits: Sequence[int] = ()
    again: bool = False
    measure: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """The base of samplers: it remembers nothing and names no prompts."""

    def start(self, pool: Pool) -> State:
        """The state before the first step: JSON values with text keys."""
        del pool
        return {}

    def places(self, prompts: int) -> int:
        """How many prompts of the uniform order a request for so many takes."""
        return prompts

    @abstractmethod
    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        """The prompts of a step. Pure: the same arguments give the same plan, on every rank and after a resume."""

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        """The state after a step (from 0) with these groups, those that `keep` dropped and those of measurements
        included. planned: the first step that is proposed from the new state, step + 1 + `rollout.staleness`."""
        del groups, pool, step, planned
        return state

    def metrics(self, state: State) -> dict[str, float]:
        """Numbers of the state for metrics, as `sampler/NAME`."""
        del state
        return {}

    def notes(self, pool: Pool) -> list[str]:
        """What a run says of its prompts before the first step, a sentence each."""
        del pool
        return []

    def most(self, prompts: int, group_size: int) -> tuple[int, int]:
        """(rows of a step, rollouts of one prompt) at most, for predictions of memory."""
        return prompts * group_size, group_size
