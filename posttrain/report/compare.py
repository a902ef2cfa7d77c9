"""Differences between runs: recipe values and final metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.report.curves import format_number, split_by_priority
from posttrain.report.run_view import RunView
from posttrain.run.resolved_recipe import flatten

AVERAGED_ROWS = 10  # last steps of a run over which its final metrics are averaged
NOT_SET = "-"


def compare_runs(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """Return the blocks of a page about several runs: a table of differing values and a table of metrics."""
    names = [view.name for view in views]
    values = [[key, *cells] for key, cells in differing_values(views).items()]
    metrics = [
        [name, *(NOT_SET if value is None else format_number(value) for value in row)]
        for name, row in final_metrics(views, every=False).items()
    ]
    tables = {
        "What differs": (["key", *names], values),
        f"What they came to (mean of the last {AVERAGED_ROWS} rows; of eval/ the last)": (["metric", *names], metrics),
    }
    return [
        {"title": title, "says": [], "bars": [], "tables": [{"title": "", "head": head, "rows": rows}]}
        for title, (head, rows) in tables.items()
        if rows
    ]


def differing_values(views: Sequence[RunView]) -> dict[str, list[str]]:
    """Return key -> value of each run as text, for keys with different values."""
    flat = [
        {key: value for key, value in flatten(view.resolved).items() if key != "run.output"} | _environment(view)
        for view in views
    ]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    cells = {key: [_format_value(values[key]) if key in values else NOT_SET for values in flat] for key in keys}
    return {key: row for key, row in cells.items() if len(set(row)) > 1}


def _environment(view: RunView) -> dict[str, Any]:
    """Return versions and commit, under names that are not recipe keys."""
    packages = (view.env.get("packages") or {}).items()
    versions = {f"({name})": version for name, version in packages}
    return {**versions, "(commit)": view.commit(), "(GPUs)": ", ".join(view.env.get("gpus", [])) or "none"}


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def final_metrics(views: Sequence[RunView], *, every: bool) -> dict[str, list[float | None]]:
    """Return name -> the final value of each run, None if the run lacks it.

    Values are the numbers of an evaluation (see `evaluation_values`) and the means of metrics over the newest rows.
    every: all metrics, not only those that a page shows first.
    """
    metrics: dict[str, list[float | None]] = {}
    measured = [evaluation_values(view.summary) for view in views]
    for key in dict.fromkeys(key for values in measured for key in values):
        row = [_number(values.get(key)) for values in measured]
        if any(value is not None for value in row):
            metrics[key] = row
    first, rest = split_by_priority(list(dict.fromkeys(name for view in views for name in view.curves.points)))
    for name in [*first, *(rest if every else [])]:
        steps = 1 if name.startswith("eval/") else AVERAGED_ROWS  # evaluations are infrequent: their mean would lag
        metrics[name] = [view.curves.recent(name, steps) for view in views]
    return metrics


def evaluation_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an evaluation's summary by name.

    These are accuracy, other values with an interval (pass@k, cons@k, benchmarks), tokens, and the share of truncated
    completions. pass@1 is omitted: it equals the accuracy.
    """
    intervals = {name: interval.get("mean") for name, interval in (summary.get("intervals") or {}).items()}
    others = {name: value for name, value in intervals.items() if name not in ("accuracy", "pass@1", "tokens")}
    values = {key: summary.get(key) for key in ("accuracy", "mean_tokens", "truncated")}
    return {"accuracy": values.pop("accuracy"), **others, **values}


def averaged_steps(view: RunView) -> str:
    """Return the steps over which `final_metrics` averages, e.g. `steps 15 to 24`; "" for a run without curves."""
    steps = sorted(
        {int(x) for name, points in view.curves.points.items() for x, _ in points[-AVERAGED_ROWS:] if "/" not in name}
    )
    shown = steps[-AVERAGED_ROWS:]
    return "" if not shown else f"step {shown[0]}" if len(shown) == 1 else f"steps {shown[0]} to {shown[-1]}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
