"""A reward that is never trained on, watched beside the one that is: they should rise together.

When the trained reward climbs and the canary falls, the policy is learning what the trained reward mismeasures. The
rule, ours: over the newest `window` steps, a straight line is fitted to the step means of either; the alarm is on while
the trained one's slope is above 0 and the canary's below 0, each by at least two standard errors of the slope. Noise
without a memory does that about once in 1,000 windows of 20 steps (a one-sided chance of some 0.03 for either); means
that wander do it more often, so an alarm is a reason to read samples, not to stop. A canary that merely stands still is
no alarm, and nothing is said before `window` steps.
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

ERRORS = 2.0  # standard errors that a slope must be away from 0


class Trend(NamedTuple):
    """rise: of the fitted line from the first to the last value. errors: the slope in standard errors of itself."""

    rise: float
    errors: float


def trend(values: Sequence[float]) -> Trend:
    """The straight line through values [n], n >= 3, at equal distances, by least squares."""
    n = len(values)
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = n * (n * n - 1) / 12  # sum of (i - middle)^2
    slope = math.fsum((i - middle) * (y - mean) for i, y in enumerate(values)) / spread
    left = math.fsum((y - mean - slope * (i - middle)) ** 2 for i, y in enumerate(values))
    error = math.sqrt(left / (n - 2) / spread)
    if error <= 1e-12 * max(1.0, abs(mean)):
        errors = 0.0 if abs(slope) <= 1e-12 * max(1.0, abs(mean)) else math.copysign(math.inf, slope)
    else:
        errors = slope / error
    return Trend(slope * (n - 1), errors)


def have_diverged(trained: Trend, canary: Trend) -> bool:
    """Whether the trained reward rises and the canary falls, both beyond doubt."""
    return trained.errors >= ERRORS and canary.errors <= -ERRORS


class Canaries:
    """The canaries of a run by name. `rows`: the metrics of earlier steps, where the run goes on."""

    def __init__(self, names: Iterable[str], window: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.window = window
        self._pairs: dict[str, deque[tuple[float, float]]] = {name: deque(maxlen=window) for name in names}
        self._alarms: dict[str, list[int]] = {name: [] for name in self._pairs}
        self._on = dict.fromkeys(self._pairs, False)
        for row in rows:
            self.add(int(row["step"]), row)

    def add(self, step: int, values: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
        """Take in a step's metrics. Returns the canaries' own metrics, and a sentence for each alarm that begins."""
        found: dict[str, float] = {}
        said: list[str] = []
        for name, pairs in self._pairs.items():
            trained, canary = values.get("reward"), values.get(f"rewards/{name}/mean")
            if trained is not None and canary is not None:
                pairs.append((float(trained), float(canary)))
            if len(pairs) < self.window:
                continue
            ours, theirs = (trend(series) for series in zip(*pairs, strict=True))
            alarm = have_diverged(ours, theirs)
            if alarm:
                self._alarms[name].append(step)
            if alarm and not self._on[name]:
                said.append(_sentence(name, self.window, ours, theirs))
            self._on[name] = alarm
            found |= {f"canary/{name}/rise": theirs.rise, f"canary/{name}/alarm": float(alarm)}
        return found, said

    def summary(self) -> dict[str, dict[str, Any]]:
        """Name -> {alarm_steps, first_alarm: step or None, alarm_at_the_end}."""
        return {
            name: {
                "alarm_steps": len(steps),
                "first_alarm": steps[0] if steps else None,
                "alarm_at_the_end": self._on[name],
            }
            for name, steps in self._alarms.items()
        }


def canaries_of(recipe: RlRecipe, directory: RunDirectory, done: int) -> Canaries:
    """The canaries of the recipe; those of a resumed run have seen its `done` steps."""
    names = [reward_name(reward) for reward in recipe.rewards if reward.canary]
    earlier = read_metrics(directory.path) if names and done else []
    return Canaries(names, recipe.scoring.canary_window, earlier)


def _sentence(name: str, window: int, trained: Trend, canary: Trend) -> str:
    return (
        f"canary {name} falls while the trained reward rises: {canary.rise:+.3g} against {trained.rise:+.3g} over the"
        f" last {count_noun(window, 'step')}. The policy may be learning what the trained reward mismeasures: read"
        " samples.jsonl"
    )
