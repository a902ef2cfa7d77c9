"""Paired comparison of two evaluations of the same problems: the difference with its interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.evaluate.estimators import paired_difference, pass_contributions
from posttrain.run.atomic_io import read_json
from posttrain.run.jsonl import read_rows

PROBLEMS = "problems.jsonl"
Problem = tuple[str, int]  # uid, and the number of earlier problems with that uid


def compare(
    run_a: Path,
    run_b: Path,
    *,
    metric: str = "accuracy",
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Compute a metric of run b minus that of run a over shared problems, by paired bootstrap.

    Returns {diff, low, high, problems, note, ...}. metric: as in `read_problem_values`. Problems that one of the runs
    lacks or could not score are excluded and counted. Raises UserError if no problem is shared.
    """
    a, b = read_problem_values(run_a, metric), read_problem_values(run_b, metric)
    shared = [key for key in a if key in b]
    if not shared:
        raise UserError(f"no problem of {run_a} is in {run_b}", hint="compare evaluations of the same data")
    result = paired_difference(
        [a[key] for key in shared], [b[key] for key in shared], level=level, resamples=resamples, seed=seed
    )
    return {
        "diff": result.mean,
        "low": result.low,
        "high": result.high,
        "level": level,
        "problems": len(shared),
        "only_in_a": len(a) - len(shared),
        "only_in_b": len(b) - len(shared),
        "informative": result.informative,
        "note": result.note,
    }


def read_problem_values(run: Path, metric: str = "accuracy") -> dict[Problem, float]:
    """Return the value of each problem of an eval run; unscored problems are excluded.

    metric: a column of problems.jsonl (accuracy, consensus, tokens), or one of `list_sample_metrics`. Raises UserError
    for a metric that the run does not have.
    """
    name, at, k = metric.partition("@")
    if at and name == "pass":
        return _pass_values(run, int(k))
    metric = "consensus" if at and name == "cons" else metric
    values = {}
    for key, row in read_problems(run).items():
        if metric not in row:
            known = ", ".join(column for column in row if column not in ("uid", "prompt", "row"))
            raise UserError(f"no metric {metric}", where=str(run / PROBLEMS), allowed=f"known: {known}")
        if row[metric] is not None:
            values[key] = float(row[metric])
    return values


def list_sample_metrics(run: Path) -> list[str]:
    """Return the multi-sample metrics that an eval run reports and that its problems.jsonl has for each problem.

    These are pass@k for k above 1 (pass@1 is the accuracy), and cons@k if k is all samples.
    """
    names = {f"cons@{row.get('samples')}" for row in read_problems(run).values()}
    all_samples = names if len(names) == 1 else set()
    intervals = (read_json(run / "summary.json") or {}).get("intervals") or {}
    measured = [name for name, found in intervals.items() if found.get("mean") is not None]
    return [name for name in measured if name in all_samples or (name.startswith("pass@") and name != "pass@1")]


def _pass_values(run: Path, k: int) -> dict[Problem, float]:
    """Return pass@k of each judged problem; raise UserError if a problem has fewer than k scored samples."""
    judged = {key: row for key, row in read_problems(run).items() if row.get("scored")}
    n, c = [row["scored"] for row in judged.values()], [row["right"] for row in judged.values()]
    values = pass_contributions(n, c, k)
    if values is None:
        raise UserError(f"no pass@{k}: some problems have fewer scored samples", where=str(run / PROBLEMS))
    return dict(zip(judged, values, strict=True))


def read_problems(run: Path) -> dict[Problem, Mapping[str, Any]]:
    """Read the rows of an eval run's problems.jsonl. Raises UserError if the file is missing."""
    path = run / PROBLEMS
    if not path.is_file():
        raise UserError(f"no finished evaluation: {PROBLEMS} is missing", where=str(run))
    rows = read_rows(path)
    return dict(zip(number_problems([row["uid"] for row in rows]), rows, strict=True))


def number_problems(uids: Sequence[str]) -> list[Problem]:
    """Return (uid, number of earlier occurrences) for each uid, in order.

    A source that is listed twice gives each problem twice.
    """
    seen: Counter[str] = Counter()
    found = []
    for uid in uids:
        found.append((uid, seen[uid]))
        seen[uid] += 1
    return found
