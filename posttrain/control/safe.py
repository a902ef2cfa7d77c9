"""SAFE: KL coefficient that is higher at low entropy and adapts its threshold to the reward's trend."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.registry import register

WINDOW = 50  # number of rewards that determine the phase
FACTORS = {"WARMUP": 1.5, "CLIMBING": 1.2, "CONVERGED": 1.0, "PLATEAU": 0.8}


@register(
    "controller",
    "safe",
    needs=("measured_kl",),
    note=(
        "In the released code the penalty is a plain number without a gradient and changes nothing but the logged loss."
        " Here its derivative by the KL is the coefficient of the differentiable KL term. The predictive check on a"
        " projected KL is not built."
    ),
)
@dataclass(frozen=True, kw_only=True)
class Safe:
    """A KL coefficient that is 0 below a moving threshold and grows with the distance above it.

    kl_short = 0.9 kl_short + 0.1 KL. threshold = clip((base + PID of the reward's velocity) * factor of the phase, 0.1,
    0.6). Phases by the last 50 rewards: fewer than 50, WARMUP 1.5; mean 0.01 above that of the 50 before, CLIMBING 1.2;
    std < 0.02 and mean > 0.7, CONVERGED 1; else PLATEAU 0.8. penalty = 0.1 (kl_short - threshold)^2 * max(0.5,
    entropy_floor / (entropy + 0.1)) above the threshold, else 0. The coefficient is its derivative, 0.2 (kl_short -
    threshold) * the same factor. Reads the metrics `kl`, `entropy`, `reward`; a step without them changes nothing.
    """

    base: float = 0.3
    entropy_floor: float = 2.0
    kp: float = 0.3
    ki: float = 0.01
    kd: float = 0.05

    def start(self, initial: float) -> dict[str, Any]:
        return {
            "coef": initial,
            "kl_short": 0.0,
            "kl_long": 0.0,
            "rewards": [],
            "ema": None,
            "integral": 0.0,
            "error": 0.0,
            "phase": "WARMUP",
            "threshold": self.base,
            "penalty": 0.0,
        }

    def value(self, state: Mapping[str, Any], step: int) -> float:
        return float(state["coef"])

    def update(self, state: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        measured = [metrics.get(name) for name in ("kl", "entropy", "reward")]
        if any(x is None or x != x for x in measured):
            return dict(state)
        kl, entropy, reward = (float(x) for x in measured)  # type: ignore[arg-type]
        rewards = [*state["rewards"], reward][-2 * WINDOW :]
        short = 0.9 * state["kl_short"] + 0.1 * kl
        velocity = self._velocity(state, reward)
        phase = classify_phase(rewards)
        threshold = min(max((self.base + velocity.pop("adjustment")) * FACTORS[phase], 0.1), 0.6)
        above = max(short - threshold, 0.0)
        pressure = max(0.5, self.entropy_floor / (entropy + 0.1))
        return {
            **velocity,
            "coef": 0.2 * above * pressure,
            "kl_short": short,
            "kl_long": 0.99 * state["kl_long"] + 0.01 * kl,
            "rewards": rewards,
            "phase": phase,
            "threshold": threshold,
            "penalty": 0.1 * above**2 * pressure,
        }

    def _velocity(self, state: Mapping[str, Any], reward: float) -> dict[str, Any]:
        """Return the PID state after one more reward, and its adjustment of the threshold (0 in the first step)."""
        if state["ema"] is None:
            return {"ema": reward, "integral": 0.0, "error": 0.0, "adjustment": 0.0}
        ema = 0.95 * state["ema"] + 0.05 * reward
        error = (ema - state["ema"]) - 0.001
        integral = min(max(state["integral"] + error, -1.0), 1.0)
        adjustment = self.kp * error + self.ki * integral + self.kd * (error - state["error"])
        return {"ema": ema, "integral": integral, "error": error, "adjustment": adjustment}


def classify_phase(rewards: list[float]) -> str:
    """Return the phase of training from all rewards so far (the last 100 are enough)."""
    if len(rewards) < WINDOW:
        return "WARMUP"
    recent = rewards[-WINDOW:]
    before = rewards[-2 * WINDOW : -WINDOW] if len(rewards) >= 2 * WINDOW else recent
    mean = statistics.fmean(recent)
    if mean > statistics.fmean(before) + 0.01:
        return "CLIMBING"
    if statistics.pstdev(recent) < 0.02 and mean > 0.7:
        return "CONVERGED"
    return "PLATEAU"
