"""Canary rewards: rewards that are logged but never trained on, and should rise together with the trained reward.

When the trained reward rises while a canary falls, the policy is learning what the trained reward mismeasures. The rule
(ours): over the newest `window` steps, fit a straight line to the step means of both rewards; the alarm is on while the
slope of the trained reward is above 0 and the canary's slope below 0, each by at least two standard errors of the
slope. White noise triggers the alarm in about one of 1,000 windows of 20 steps (a one-sided probability of about 0.03
for each slope); autocorrelated means trigger it more often, so an alarm is a reason to read samples, not to stop. A
canary that merely stagnates triggers no alarm, and no alarm is possible before `window` steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.errors import count_noun
from posttrain.recipe.reward_checks import reward_name
from posttrain.recipe.stages import RlRecipe
from posttrain.run.directory import RunDirectory
from posttrain.run.metrics import read_metrics

MIN_STANDARD_ERRORS = 2.0  # minimum distance of a slope from 0, in standard errors


class Trend(NamedTuple):
    """Fitted line.

    rise: difference between its last and first value. errors: slope divided by its standard error (t statistic).
    """

    rise: float
    errors: float


def fit_trend(values: Sequence[float]) -> Trend:
    """Fit a least-squares line to n >= 3 equally spaced values."""
    n = len(values)
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = n * (n * n - 1) / 12  # sum of (i - middle)^2
    slope = math.fsum((i - middle) * (y - mean) for i, y in enumerate(values)) / spread
    residuals = math.fsum((y - mean - slope * (i - middle)) ** 2 for i, y in enumerate(values))
    error = math.sqrt(residuals / (n - 2) / spread)
    if error <= 1e-12 * max(1.0, abs(mean)):
        errors = 0.0 if abs(slope) <= 1e-12 * max(1.0, abs(mean)) else math.copysign(math.inf, slope)
    else:
        errors = slope / error
    return Trend(slope * (n - 1), errors)


def have_diverged(trained: Trend, canary: Trend) -> bool:
    """Return whether the trained reward rises and the canary falls, both significantly."""
    return trained.errors >= MIN_STANDARD_ERRORS and canary.errors <= -MIN_STANDARD_ERRORS


class Canaries:
    """Canaries of a run, by name. `rows`: metrics of earlier steps of a resumed run."""

    def __init__(self, names: Iterable[str], window: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.window = window
        self._pairs: dict[str, deque[tuple[float, float]]] = {name: deque(maxlen=window) for name in names}
        self._alarms: dict[str, list[int]] = {name: [] for name in self._pairs}
        self._on = dict.fromkeys(self._pairs, False)
        for row in rows:
            self.add(int(row["step"]), row)

    def add(self, step: int, values: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
        """Add a step's metrics. Returns the canary metrics, and a message for each alarm that begins."""
        metrics: dict[str, float] = {}
        messages: list[str] = []
        for name, pairs in self._pairs.items():
            trained, canary = values.get("reward"), values.get(f"rewards/{name}/mean")
            if trained is not None and canary is not None:
                pairs.append((float(trained), float(canary)))
            if len(pairs) < self.window:
                continue
            trained_trend, canary_trend = (fit_trend(series) for series in zip(*pairs, strict=True))
            alarm = have_diverged(trained_trend, canary_trend)
            if alarm:
                self._alarms[name].append(step)
            if alarm and not self._on[name]:
                messages.append(_alarm_message(name, self.window, trained_trend, canary_trend))
            self._on[name] = alarm
            metrics |= {f"canary/{name}/rise": canary_trend.rise, f"canary/{name}/alarm": float(alarm)}
        return metrics, messages

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return name -> {alarm_steps, first_alarm: step or None, alarm_at_the_end}."""
        return {
            name: {
                "alarm_steps": len(steps),
                "first_alarm": steps[0] if steps else None,
                "alarm_at_the_end": self._on[name],
            }
            for name, steps in self._alarms.items()
        }


def create_canaries(recipe: RlRecipe, directory: RunDirectory, done: int) -> Canaries:
    """Create the canaries of a recipe; in a resumed run, feed them the metrics of its `done` steps."""
    names = [reward_name(reward) for reward in recipe.rewards if reward.canary]
    earlier = read_metrics(directory.path) if names and done else []
    return Canaries(names, recipe.scoring.canary_window, earlier)


def _alarm_message(name: str, window: int, trained: Trend, canary: Trend) -> str:
    return (
        f"canary {name} falls while the trained reward rises: {canary.rise:+.3g} against {trained.rise:+.3g} over the"
        f" last {count_noun(window, 'step')}. The policy may be learning what the trained reward mismeasures: read"
        " samples.jsonl"
    )
