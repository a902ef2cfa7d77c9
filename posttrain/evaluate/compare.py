"""Two evaluations of the same problems: the difference with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.evaluate.estimators import paired_difference
from posttrain.run.jsonl import read_rows


def compare(
    run_a: Path,
    run_b: Path,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Accuracy of b minus that of a over the problems that both runs have, resampled in pairs -> {diff, low, high,
    problems, note, ...}.

    Problems that one of the runs lacks or could not score are left out and counted. Raises UserError if none is shared.
    """
    a, b = problem_values(run_a), problem_values(run_b)
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


def problem_values(run: Path, metric: str = "accuracy") -> dict[tuple[str, int], float]:
    """(uid, how often that uid came before) -> value of each problem of an eval run; unscored ones are left out.

    metric: a column of problems.jsonl (accuracy, consensus, tokens).
    """
    path = run / "problems.jsonl"
    if not path.is_file():
        raise UserError("no finished evaluation: problems.jsonl is missing", where=str(run))
    values: dict[tuple[str, int], float] = {}
    seen: dict[str, int] = {}
    for row in read_rows(path):
        if metric not in row:
            raise UserError(f"no metric {metric}", where=str(path), allowed=f"known: {', '.join(row)}")
        key = (row["uid"], seen.get(row["uid"], 0))
        seen[row["uid"]] = key[1] + 1
        if row[metric] is not None:
            values[key] = float(row[metric])
    return values
