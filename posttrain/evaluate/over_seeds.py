"""Statistics over runs that differ in their seed: mean and t-interval. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom; the last one also serves for more.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def seed_interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """Compute {mean, low, high, runs}: the mean and its 95% t-interval over runs.

    A single run has no interval; without runs all but `runs` are None.
    """
    runs = len(values)
    if not runs:
        return {"mean": None, "low": None, "high": None, "runs": 0}
    mean = math.fsum(values) / runs
    if runs == 1:
        return {"mean": mean, "low": None, "high": None, "runs": 1}
    variance = math.fsum((value - mean) ** 2 for value in values) / (runs - 1)
    half = T_975[min(runs - 1, len(T_975)) - 1] * math.sqrt(variance / runs)
    return {"mean": mean, "low": mean - half, "high": mean + half, "runs": runs}


def summarise_settings(
    summaries: Mapping[str, Mapping[str, Mapping[str, Any] | None]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one row per setting of {setting: {seed: summary of the run, None if it failed}}.

    A row has `setting`, `runs` (finished), `of` (started), and for each of the names the interval over the seeds whose
    summary has it.
    """
    rows = []
    for setting, runs in summaries.items():
        row: dict[str, Any] = {
            "setting": setting,
            "runs": sum(summary is not None for summary in runs.values()),
            "of": len(runs),
        }
        for name in names:
            found = [summary.get(name) for summary in runs.values() if summary is not None]
            numbers = [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]
            row[name] = seed_interval(numbers)
        rows.append(row)
    return rows
