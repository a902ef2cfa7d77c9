"""Rules that adapt difficulty to the policy: stages with a threshold, and a continuous difficulty per environment.

Pure functions of numbers; the samplers that call them hold the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

Mode = Literal["linear", "tanh", "base", "base_tanh"]


def next_stage(stage: int, pass_rate: float, stages: int, *, threshold: float = 0.8) -> int:
    """Return the next stage if pass_rate >= threshold, else the same stage; the last stage stays (SATURN)."""
    return min(stage + 1, stages - 1) if pass_rate >= threshold else stage


def propose_levels(d: float, batch: int = 8) -> dict[int, int]:
    """Return level -> number of problems, out of `batch`, so that the mean level is d up to 1 / (2 batch) (SCALER).

    round(batch * (d - floor(d))) problems have the level above d, all others the level below; a level without problems
    is left out.
    """
    low = math.floor(d)
    above = round(batch * (d - low))
    return {level: count for level, count in ((low, batch - above), (low + 1, above)) if count}


def next_difficulty(
    d: float,
    results: Mapping[int, tuple[float, float]],
    *,
    target: float = 0.5,
    k: float = 2.0,
    cap: float = 1.0,
    d_max: float = 50.0,
    mode: Mode = "linear",
) -> float:
    """Update a difficulty after a batch: raise it if accuracy is above the target, lower it if below (SCALER).

    results: level -> (accuracy, problems), at most two levels. With two levels, the accuracy is interpolated at d; the
    `base` modes use the mean over all problems. The step is k * (accuracy - target), in the `tanh` modes tanh(3 k
    (accuracy - target)) / tanh(3) * cap; its size is at most `cap`, and d stays in [0, d_max]. Without results d does
    not change.
    """
    if not results:
        return d
    if mode.startswith("base") or len(results) < 2:
        accuracy = mean_accuracy(results)
    else:
        accuracy = sum((1 - abs(d - level)) * reached for level, (reached, _) in results.items())
    step = k * (accuracy - target)
    if mode.endswith("tanh"):
        step = math.tanh(3 * step) / math.tanh(3) * cap
    return min(max(d + min(max(step, -cap), cap), 0.0), d_max)


def mean_accuracy(results: Mapping[int, tuple[float, float]]) -> float:
    """Compute the accuracy over all problems of a batch from level -> (accuracy, problems)."""
    count = sum(problems for _, problems in results.values())
    return sum(reached * problems for reached, problems in results.values()) / count if count else 0.0


def check_retirement(
    d_history: Sequence[float],
    acc_history: Sequence[float],
    *,
    history_len: int = 10,
    d_max: float = 50.0,
    zero_limit: int = 5,
    max_limit: int = 5,
) -> dict[str, float | bool]:
    """Decide whether an environment retires, from its last difficulties and accuracies; returns {"retire", "slope",
    "zero_run", "max_run"} (SCALER).

    An environment retires if its newest `zero_limit` accuracies are 0, its newest `max_limit` difficulties are d_max,
    or the least-squares slope of its last history_len difficulties is not positive. With fewer than history_len
    difficulties the slope counts as 1.
    """
    zero_run = count_trailing_true([accuracy == 0 for accuracy in acc_history])
    max_run = count_trailing_true([d >= d_max for d in d_history])
    slope = fit_slope(d_history[-history_len:]) if len(d_history) >= history_len else 1.0
    retire = zero_run >= zero_limit or max_run >= max_limit or slope <= 0
    return {"retire": retire, "slope": slope, "zero_run": zero_run, "max_run": max_run}


def count_trailing_true(flags: Sequence[bool]) -> int:
    """Return the length of the run of True at the end of flags."""
    return next((n for n, flag in enumerate(reversed(flags)) if not flag), len(flags))


def fit_slope(values: Sequence[float]) -> float:
    """Compute the least-squares slope of values against 0, 1, 2, ...; 0 for fewer than two."""
    middle, mean = (len(values) - 1) / 2, sum(values) / max(len(values), 1)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread if spread else 0.0


def environment_weight(
    d_history: Sequence[float],
    age: float | None,
    *,
    alpha: float = 1.0,
    beta: float = 0.5,
    slope_scale: float = 0.05,
    age_scale: float = 10000,
    history_len: int = 10,
) -> float:
    """Compute the sampling weight of an environment: alpha * learning progress + beta * time since last use (SCALER).

    Learning progress is 1 - exp(-max(0, slope) / slope_scale) over the last history_len difficulties, 1 with fewer than
    three. Time since last use is min(1, age / age_scale) with age in steps, 1 if the environment was never used (age
    None).
    """
    recent = d_history[-history_len:]
    learning = 1.0 if len(recent) < 3 else 1 - math.exp(-max(0.0, fit_slope(recent)) / slope_scale)
    waiting = 1.0 if age is None else min(1.0, age / age_scale)
    return alpha * learning + beta * waiting
