"""Coefficients that are functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.registry import register


@register(
    "controller",
    "grpo_d",
    paper="2503.16081",
    note="The paper's words say that the coefficient starts small; its formula, which is followed, starts half way.",
)
@dataclass(frozen=True, kw_only=True)
class GrpoD:
    """A KL coefficient that first decreases, for exploration, and then increases, for stability.

    Linear from (low + high) / 2 down to `low` over the first explore_frac of total_steps, then linear up to `high` at
    the end. The paper uses low 0, high 0.02 for reasoning and 0.04, 0.1 for simple tasks.
    """

    total_steps: int | None = None  # None = the run's
    low: float = 0.0
    high: float = 0.02
    explore_frac: float = 0.3

    def start(self, initial: float) -> dict[str, Any]:
        return {}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        total = self.total_steps or 1
        at = min(max(step, 0), total)
        turn = self.explore_frac * total
        if turn > 0 and at <= turn:
            middle = (self.low + self.high) / 2
            return middle - (middle - self.low) * at / turn
        return self.low + (self.high - self.low) * (at - turn) / max(total - turn, 1e-12)

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        return dict(state)


@register("controller", "remix_convex", paper="2507.06892", needs=("multiplies",))
@dataclass(frozen=True, kw_only=True)
class RemixConvex:
    """ReMix's convex mixture of two KL terms: the reference's share is 1 for 50 steps, then drops by 0.1 every 10 steps
    to 0.5.

    The share in step t is max(1 - 0.1 * ceil(max(t - 50, 0) / 10), 0.5). The value is the coefficient times the share,
    or times 1 - share with `complement`. Use one controller for the coefficient of the KL to the reference and one with
    `complement` for that of `kl_old`, both with the same initial coefficient.
    """

    complement: bool = False

    def start(self, initial: float) -> dict[str, Any]:
        return {"coef": initial}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        share = reference_share(step)
        return state["coef"] * (1 - share if self.complement else share)

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        return dict(state)


def reference_share(step: int) -> float:
    """Compute max(1 - 0.1 * ceil(max(step - 50, 0) / 10), 0.5), in tenths so that 0.9 is exact."""
    return max(10 - math.ceil(max(step - 50, 0) / 10), 5) / 10
