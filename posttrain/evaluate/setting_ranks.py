"""Ranking of the settings of a sweep, by an evaluation if there is one, else by the end of the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from posttrain.evaluate.estimators import has_interval
from posttrain.run.atomic_io import read_json
from posttrain.run.metrics import read_metrics

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


def summarize_settings(
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
            values = [summary.get(name) for summary in runs.values() if summary is not None]
            numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
            row[name] = seed_interval(numbers)
        rows.append(row)
    return rows


LAST_FRACTION = 0.25  # of a run's steps, whose mean is the result of the run
LOWER_IS_BETTER = ("loss",)
SUMMARY_NAMES = ("accuracy", "reward_last", "loss_last")  # numbers of a summary, for runs without metrics
Kind = Literal["evaluation", "held_out", "last_part", "summary"]


@dataclass(frozen=True)
class Criterion:
    """Criterion by which settings are ranked.

    kind: `evaluation` (accuracy on the problems of --eval, or of an eval run), `held_out` (the last evaluation of each
    training), `last_part` (mean of a metric over the end of each run), `summary` (a number of the summary). name: the
    metric.
    """

    kind: Kind
    name: str

    @property
    def lower_is_better(self) -> bool:
        return self.name.rpartition("/")[2].removesuffix("_last") in LOWER_IS_BETTER

    def describe(self) -> str:
        """Describe the criterion and which end is best, to follow `ranked by`."""
        description = {
            "evaluation": "accuracy on the problems of the evaluation",
            "held_out": f"{self.name} of the last held-out evaluation",
            "last_part": f"mean {self.name} over the last quarter of the steps",
            "summary": f"{self.name.replace('_', ' ')} of the summaries",
        }[self.kind]
        return f"{description}, {'lowest' if self.lower_is_better else 'highest'} first"


def choose_criterion(runs: Sequence[Path], *, measured: bool) -> Criterion:
    """Choose the criterion for finished runs. measured: their models were evaluated, or they are evaluations."""
    if measured:
        return Criterion("evaluation", "accuracy")
    rows = [row for run in runs for row in read_metrics(run)]
    names = {name for row in rows for name, value in row.items() if _is_number(value)}
    evaluation = next(((read_json(run / "resolved.json") or {}).get("eval") for run in runs), None) or {}
    held_out = [evaluation.get("metric"), "accuracy", "reward", "loss"]
    if found := next((f"eval/{name}" for name in held_out if name and f"eval/{name}" in names), None):
        return Criterion("held_out", found)
    if found := next((name for name in ("reward", "loss") if name in names), None):
        return Criterion("last_part", found)
    there = {name for run in runs for name in read_json(run / "summary.json") or {}}
    return Criterion("summary", next((name for name in SUMMARY_NAMES if name in there), SUMMARY_NAMES[-1]))


def measure_setting(runs: Sequence[Path], criterion: Criterion) -> dict[str, Any]:
    """Compute {mean, low, high, runs, over} of a setting by a criterion of finished runs, other than `evaluation`.

    The interval is Student's t over the runs' seeds. For a single run it is the interval of its evaluation (over
    problems), or Student's t over the steps of its last part, which does not cover the variation between seeds. over:
    which of the three; "" without an interval.
    """
    values = [value for run in runs if (value := _ranked_values(run, criterion))]
    means = [math.fsum(of_run) / len(of_run) for of_run in values]
    if len(means) != 1:
        return {**seed_interval(means), "over": "seeds" if len(means) > 1 else ""}
    if criterion.kind == "held_out" and (bounds := _last_bounds(runs, criterion.name)):
        return {"mean": means[0], "low": bounds[0], "high": bounds[1], "runs": 1, "over": "problems"}
    of_steps = seed_interval(values[0])
    return {**of_steps, "runs": 1, "over": "steps" if of_steps["low"] is not None else ""}


def _ranked_values(run: Path, criterion: Criterion) -> list[float]:
    """Return the values of a run whose mean it is ranked by; empty if it has none."""
    if criterion.kind == "summary":
        value = (read_json(run / "summary.json") or {}).get(criterion.name)
        return [float(value)] if _is_number(value) else []
    values = [float(row[criterion.name]) for row in read_metrics(run) if _is_number(row.get(criterion.name))]
    return values[-1:] if criterion.kind == "held_out" else values[-max(1, math.ceil(LAST_FRACTION * len(values))) :]


def _last_bounds(runs: Sequence[Path], name: str) -> tuple[float, float] | None:
    """Return the interval of a metric in the last evaluation of the only run with numbers."""
    for run in runs:
        rows = [row for row in read_metrics(run) if _is_number(row.get(name))]
        if rows and _is_number(low := rows[-1].get(f"{name}/low")) and _is_number(high := rows[-1].get(f"{name}/high")):
            return float(low), float(high)
    return None


def rank_rows(rows: Sequence[Mapping[str, Any]], criterion: Criterion) -> list[dict[str, Any]]:
    """Sort rows by their `ranked` {mean, low, high, ...}, best first, each with its `rank` from 1.

    Rows without a number come last and have rank None.
    """
    sign = 1 if criterion.lower_is_better else -1
    ranked = sorted(
        (row for row in rows if row["ranked"]["mean"] is not None), key=lambda row: sign * row["ranked"]["mean"]
    )
    unranked = [row for row in rows if row["ranked"]["mean"] is None]
    return [
        *({**row, "rank": number} for number, row in enumerate(ranked, 1)),
        *({**row, "rank": None} for row in unranked),
    ]


def describe_ranking(rows: Sequence[Mapping[str, Any]], criterion: Criterion) -> list[str]:
    """Describe the ranking: the criterion, what the intervals are over, and which settings overlap with the first."""
    sentences = [f"Ranked by {criterion.describe()}; {_describe_intervals(rows)}."]
    ranked = [row for row in rows if row["rank"] is not None]
    if len(ranked) > 1 and len({row["ranked"]["mean"] for row in ranked}) == 1:
        return [*sentences, f"All settings have the same value, {ranked[0]['ranked']['mean']:.4g}: they have no order."]
    if len(ranked) > 1 and has_interval(ranked[0]["ranked"]):
        first = ranked[0]["ranked"]
        near = [row["setting"] for row in ranked[1:] if _overlaps(first, row["ranked"])]
        if near:
            others = (
                f"those of {len(near)} other settings"
                if len(near) > 3
                else " and ".join(f"that of {setting}" for setting in near)
            )
            sentences.append(
                f"The interval of {ranked[0]['setting']} overlaps with {others}: their order may be chance."
            )
        else:
            sentences.append(f"The interval of {ranked[0]['setting']} overlaps with no other.")
    return sentences


def _describe_intervals(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe what the intervals of the rows are over."""
    several = any(row["ranked"]["runs"] > 1 for row in rows)
    seeds = "each averaged over the seeds; they do not cover training variance" if several else "of one seed"
    meant = {
        "seeds": "over seeds (Student's t)",
        "problems": f"over problems, {seeds}",
        "steps": "over the steps of one run: another seed may move it further",
    }
    factors = dict.fromkeys(row["ranked"]["over"] for row in rows if has_interval(row["ranked"]))
    over = [meant[factor] for factor in factors]
    if over:
        return f"95% intervals are {', or '.join(over)}"
    if any(row["ranked"]["over"] for row in rows):
        return "without intervals, because the values of each setting are all equal"
    return "without intervals, because each setting has one run: add run.seed=0,1,2"


def _overlaps(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two intervals share a value; True if either is missing, since the order may then be chance."""
    if one["low"] is None or other["low"] is None:
        return True
    return bool(one["low"] <= other["high"] and other["low"] <= one["high"])


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
