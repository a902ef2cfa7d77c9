"""Two evaluations of the same problems: the difference with its interval."""

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
Problem = tuple[str, int]  # its uid, and how many problems with that uid came before


def compare(
    run_a: Path,
    run_b: Path,
    *,
    metric: str = "accuracy",
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """A metric of b minus that of a over the problems that both runs have, resampled in pairs -> {diff, low, high,
    problems, note, ...}. metric: as in `problem_values`.

    Problems that one of the runs lacks or could not score are left out and counted. Raises UserError if none is shared.
    """
    a, b = problem_values(run_a, metric), problem_values(run_b, metric)
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


def problem_values(run: Path, metric: str = "accuracy") -> dict[Problem, float]:
    """Problem -> value of each problem of an eval run; unscored ones are left out.

    metric: a column of problems.jsonl (accuracy, consensus, tokens), or one of `sample_metrics`. Raises UserError for a
    metric that the run does not have.
    """
    name, at, k = metric.partition("@")
    if at and name == "pass":
        return _pass_values(run, int(k))
    metric = "consensus" if at and name == "cons" else metric
    values = {}
    for key, row in problems_of(run).items():
        if metric not in row:
            known = ", ".join(column for column in row if column not in ("uid", "prompt", "row"))
            raise UserError(f"no metric {metric}", where=str(run / PROBLEMS), allowed=f"known: {known}")
        if row[metric] is not None:
            values[key] = float(row[metric])
    return values


def sample_metrics(run: Path) -> list[str]:
    """The metrics over several samples that an eval run reports and that its problems.jsonl has for each problem:
    pass@k for k above 1 (pass@1 is the accuracy), and cons@k where k is all samples."""
    votes = {f"cons@{row.get('samples')}" for row in problems_of(run).values()}
    whole = votes if len(votes) == 1 else set()
    intervals = (read_json(run / "summary.json") or {}).get("intervals") or {}
    measured = [name for name, found in intervals.items() if found.get("mean") is not None]
    return [name for name in measured if name in whole or (name.startswith("pass@") and name != "pass@1")]


def _pass_values(run: Path, k: int) -> dict[Problem, float]:
    judged = {key: row for key, row in problems_of(run).items() if row.get("scored")}
    n, c = [row["scored"] for row in judged.values()], [row["right"] for row in judged.values()]
    values = pass_contributions(n, c, k)
    if values is None:
        raise UserError(f"no pass@{k}: some problems have fewer scored samples", where=str(run / PROBLEMS))
    return dict(zip(judged, values, strict=True))


def problems_of(run: Path) -> dict[Problem, Mapping[str, Any]]:
    """The rows of an eval run's problems.jsonl. Raises UserError without one."""
    path = run / PROBLEMS
    if not path.is_file():
        raise UserError(f"no finished evaluation: {PROBLEMS} is missing", where=str(run))
    rows = read_rows(path)
    return dict(zip(number_problems([row["uid"] for row in rows]), rows, strict=True))


def number_problems(uids: Sequence[str]) -> list[Problem]:
    """(uid, how often it came before) of each, in order: a source that is listed twice gives each problem twice."""
    seen: Counter[str] = Counter()
    found = []
    for uid in uids:
        found.append((uid, seen[uid]))
        seen[uid] += 1
    return found
