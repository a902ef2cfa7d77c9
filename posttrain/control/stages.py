"""Controllers by stage, along a cosine, and DECS's share of solved prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError, count_noun
from posttrain.registry import register


@register("controller", "stages", paper="2503.06749")
@dataclass(frozen=True, kw_only=True)
class Stages:
    """One value per stage: values[k] until step until[k] (exclusive), then the last value.

    PTST (Vision-R1) sets `rollout.max_new_tokens` to 4096, 8192, 16384 and `rollout.group_size` to 16, 8, 4, so that
    every step costs the same; the paper does not state when a stage ends (100 and 200 are guesses). Also usable as a
    warm-up of a length term's weight: values [0, 0.5], until [100].
    """

    values: tuple[float, ...]
    until: tuple[int, ...]

    def start(self, initial: float) -> dict[str, Any]:
        if len(self.values) != len(self.until) + 1 or sorted(set(self.until)) != list(self.until):
            raise UserError(
                f"stages with {count_noun(len(self.values), 'value')} and until {list(self.until)}",
                allowed="one value more than `until`, which rises",
            )
        return {}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        return self.values[find_stage(step, self.until)]

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        return dict(state)


def find_stage(step: int, until: Sequence[int]) -> int:
    """Return the index of the stage that a step belongs to."""
    return sum(step >= end for end in until)


@register("controller", "equal_stages", paper="2509.08755")
@dataclass(frozen=True, kw_only=True)
class EqualStages:
    """values[k] in the k-th stage of `every` steps, then the last value.

    ScalingInter-RL allows an agent more turns in later stages (5, 8 and 10 for search, every 100 steps). The stage
    depends only on the number of finished steps, so a resumed run matches an uninterrupted one.
    """

    values: tuple[float, ...]
    every: int = 100

    def start(self, initial: float) -> dict[str, Any]:
        if not self.values or self.every < 1:
            raise UserError(
                f"equal_stages with {count_noun(len(self.values), 'value')} every {count_noun(self.every, 'step')}"
            )
        return {}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        return equal_stage(step + 1, self.values, self.every)

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        return dict(state)


def equal_stage(number: int, rounds: Sequence[float], every: int = 100) -> float:
    """Return the value of `rounds` in step `number`, counted from 1, in stages of `every` steps."""
    return rounds[min((number - 1) // every, len(rounds) - 1)]


@register("controller", "cosine")
@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from `high` at step 0 to `low` at total_steps, and `low` from then on."""

    total_steps: int | None = None  # None = the run's
    high: float = 1.0
    low: float = 0.0

    def start(self, initial: float) -> dict[str, Any]:
        return {}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        share = min(max(step / max(self.total_steps or 1, 1), 0.0), 1.0)
        return self.low + 0.5 * (self.high - self.low) * (1 + math.cos(math.pi * share))

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        return dict(state)


@register("controller", "redundancy", paper="2509.25827")
@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """DECS: adapts kappa, the share of solved prompts to keep, to how necessary the thoughts of correct answers are.

    kappa += beta * (R - previous R), then clipped to 0 and the share of solved prompts in the batch. kappa does not
    change at the first R, nor in a step without a correct answer. R is the mean of `necessary`, a component that only
    correct rows have. Use it for `keep.kappa` of `mixed_plus_solved`. The authors' code does not clip kappa; the paper
    does.
    """

    beta: float = 0.2
    necessary: str = "rewards/necessary_prefix/mean"
    solved: str = "signal/too_easy"

    def start(self, initial: float) -> dict[str, Any]:
        return {"kappa": initial, "ratio": None}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        return float(state["kappa"])

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        ratio, before = metrics.get(self.necessary), state["ratio"]
        if ratio is None:
            return dict(state)
        if before is None:
            return {**state, "ratio": ratio}
        kappa = state["kappa"] + self.beta * (ratio - before)
        return {"kappa": min(max(kappa, 0.0), metrics.get(self.solved) or 0.0), "ratio": ratio}
