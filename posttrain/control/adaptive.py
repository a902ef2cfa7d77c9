"""Adaptive KL coefficient (PPO for RLHF, arXiv 1909.08593)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.registry import register


@register("controller", "adaptive_kl", paper="1909.08593", needs=("multiplies", "measured_kl"))
@dataclass(frozen=True, kw_only=True)
class AdaptiveKl:
    """Raises the coefficient while the measured KL is above `target`, lowers it below, by at most 20% * rows / horizon.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(rows / horizon, 1)) after each step: the coefficient keeps its
    sign also where a step has more rows than the horizon. Starts at the recipe's number, which must not be 0. Reads the
    metrics `kl` (mean over trained tokens, so the target is per token) and `rollout/rows`; a step without a KL changes
    nothing. target and horizon are to be set by the user: early RLHF used 6 nats per answer and 10000.
    """

    target: float = 0.01
    horizon: float = 10000.0

    def start(self, initial: float) -> dict[str, Any]:
        return {"coef": initial}

    def value(self, state: Mapping[str, Any], step: int) -> float:
        return float(state["coef"])

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        kl = metrics.get("kl")
        if kl is None or kl != kl:
            return dict(state)
        rows = metrics.get("rollout/rows", 1)
        return {"coef": adaptive_coef(state["coef"], kl, target=self.target, horizon=self.horizon, n_steps=rows)}


def adaptive_coef(coef: float, kl: float, *, target: float, horizon: float, n_steps: float) -> float:
    """Return the coefficient after a step with a mean KL of `kl` over `n_steps` samples (arXiv 1909.08593).

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(n_steps / horizon, 1)).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(n_steps / horizon, 1.0))
