"""Closing table of a pipeline: evaluations of the same problems, for several seeds, compared with the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.evaluate.compare import read_problem_values
from posttrain.evaluate.estimators import Interval, bootstrap_ci, has_interval, paired_difference

Values = Mapping[tuple[str, int], float]
Seeds = Mapping[str, Values]  # seed -> value of each problem
PROBLEM_INTERVALS_NOTE = (
    "These intervals are over problems, each averaged over the seeds. They do not cover training variance, which the"
    " spread of the seeds shows."
)


def closing_table(evaluations: Mapping[str, Mapping[str, Path]], *, level: float = 0.95) -> list[dict[str, Any]]:
    """Return one row per entry of `evaluations` (model's name -> seed -> directory of the eval run), in that order.

    A row: `model`; `seeds` {seed: {mean, low, high}}; `pooled`, the same over seeds; `mean_tokens`; `difference` to the
    first row, pooled and per seed (None in the first row). Seeds are pooled by averaging each problem over them, so a
    problem counts once. Differences are over shared problems. Intervals are over problems, not over seeds.
    """
    rows: list[dict[str, Any]] = []
    baseline: tuple[str, Seeds] | None = None
    for name, runs in evaluations.items():
        seeds = {seed: read_problem_values(path) for seed, path in runs.items()}
        lengths = mean_over_seeds({seed: read_problem_values(path, "tokens") for seed, path in runs.items()})
        rows.append(
            {
                "model": name,
                "seeds": {seed: _bounds(bootstrap_ci(list(v.values()), level=level)) for seed, v in seeds.items()},
                "pooled": _bounds(bootstrap_ci(list(mean_over_seeds(seeds).values()), level=level)),
                "mean_tokens": sum(lengths.values()) / len(lengths) if lengths else None,
                "difference": compute_difference(*baseline, seeds, level) if baseline else None,
                "level": level,
            }
        )
        baseline = baseline or (name, seeds)
    return rows


def mean_over_seeds(seeds: Seeds) -> dict[tuple[str, int], float]:
    """Return each problem's mean over the seeds that have it."""
    gathered: dict[tuple[str, int], list[float]] = {}
    for values in seeds.values():
        for key, value in values.items():
            gathered.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in gathered.items()}


def compute_difference(name: str, before: Seeds, after: Seeds, level: float) -> dict[str, Any]:
    """Compute after minus before, problem by problem: `to`, mean, low, high, and the same for each seed in `seeds`."""
    by_seed = {seed: _bounds(_paired_interval(before[seed], after[seed], level)) for seed in after if seed in before}
    return {
        "to": name,
        **_bounds(_paired_interval(mean_over_seeds(before), mean_over_seeds(after), level)),
        "seeds": by_seed,
    }


def _paired_interval(before: Values, after: Values, level: float) -> Interval:
    """Compute the paired interval over shared problems."""
    shared = [key for key in before if key in after]
    return paired_difference([before[key] for key in shared], [after[key] for key in shared], level=level)


def _bounds(interval: Interval) -> dict[str, float | None]:
    """Return mean, low and high of an interval."""
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def describe_findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each compared row: its distance from the first row, and whether the interval excludes 0.

    With intervals over several seeds, a last sentence says what they do not cover.
    """
    compared = [row for row in rows if row["difference"] and row["difference"]["mean"] is not None]
    several = any(len(row["difference"]["seeds"]) > 1 and has_interval(row["difference"]) for row in compared)
    return [*map(_describe_difference, compared), *([PROBLEM_INTERVALS_NOTE] if several else [])]


def _describe_difference(row: Mapping[str, Any]) -> str:
    """Describe the difference of a row to the first row."""
    found = row["difference"]
    if found["mean"] == found["low"] == found["high"] == 0:
        return f"{row['model']} and {found['to']} are equally often right on every problem."
    direction = "above" if found["mean"] > 0 else "below"
    distance = f"{abs(found['mean']):.3f} {direction}" if abs(found["mean"]) >= 0.0005 else "within 0.0005 of"
    start = f"{row['model']} is {distance} {found['to']}" if found["mean"] else f"{row['model']} equals {found['to']}"
    if not has_interval(found):
        return f"{start}; without an interval, because the difference is the same on every problem."
    sign = _interval_sign(found)
    interval = f"{start}: the {100 * row['level']:g}% interval [{found['low']:+.3f}, {found['high']:+.3f}]"
    if sign == 0:
        return f"{interval} includes 0" + (", no difference is shown." if found["mean"] else ".")
    seeds = ""
    if len(found["seeds"]) > 1:
        agree = sum(_interval_sign(seed) == sign for seed in found["seeds"].values())
        each = ", ".join("-" if seed["mean"] is None else f"{seed['mean']:+.3f}" for seed in found["seeds"].values())
        seeds = f", for {agree} of {len(found['seeds'])} seeds on its own ({each})"
    return f"{interval} excludes 0{seeds}."


def _interval_sign(bounds: Mapping[str, Any]) -> int:
    """Return 1 for an interval above 0, -1 below, and 0 if it includes 0 or is missing."""
    if bounds["low"] is None:
        return 0
    return 1 if bounds["low"] > 0 else -1 if bounds["high"] < 0 else 0
