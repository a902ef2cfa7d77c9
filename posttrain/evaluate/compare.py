"""Comparison of two evaluations of the same problems: paired difference, efficiency, and sources of the gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError, UserError
from posttrain.evaluate.efficiency import Efficiency, accuracy_capability, efficiency_metrics
from posttrain.evaluate.estimators import paired_difference, pass_contributions
from posttrain.evaluate.summary import Record, group_by_problem, verdict
from posttrain.path_resolution import candidate_paths
from posttrain.recipe.eval_sections import EvalSettings
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
    measured = [name for name, interval in intervals.items() if interval.get("mean") is not None]
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
    problems = []
    for uid in uids:
        problems.append((uid, seen[uid]))
        seen[uid] += 1
    return problems


def compute_efficiency(
    records: Sequence[Record], base: Mapping[str, float] | None, weights: Sequence[float]
) -> Efficiency:
    """Compute efficiency_metrics of the judged samples; base: `accuracy` and `length` of the baseline, or None."""
    judged = [record for record in records if verdict(record) is not None]
    alpha, beta, gamma = weights
    return efficiency_metrics(
        [float(bool(verdict(record))) for record in judged],
        [record["tokens"] for record in judged],
        base_accuracy=None if base is None else base["accuracy"],
        base_length=None if base is None else base["length"],
        alpha=alpha,
        beta=beta,
        gamma=gamma,
    )


def find_baseline(baseline: str, base_dir: Path) -> Path:
    """Return the run directory of a baseline, given as that directory or as its problems.jsonl.

    Raises RecipeError if it holds no evaluation.
    """
    for path in candidate_paths(baseline, base_dir):
        folder = path.parent if path.name == PROBLEMS else path
        if "accuracy" in next(iter(read_rows(folder / PROBLEMS)), {}):
            return folder
    raise RecipeError(f"{baseline} holds no finished evaluation ({PROBLEMS})", where="eval.baseline")


def compare_with_baseline(
    baseline: Path, run: Path, records: Sequence[Record], settings: EvalSettings, seed: int
) -> dict[str, Any]:
    """Return the summary's comparison with a baseline, over the problems that both runs have.

    difference: paired interval of accuracy. efficiency: with the baseline as the reference. capability: buckets of
    difficulty and the split of the gain, over problems with equally many judged samples in both runs (pass@k for those
    k of the recipe that the samples allow); None if there are none.
    """
    before, after = read_problems(baseline), read_problems(run)
    shared = [problem for problem in after if problem in before]
    samples = sum(before[problem]["samples"] for problem in shared)
    judged = sum(before[problem]["scored"] for problem in shared)
    base = None
    if judged:
        base = {
            "accuracy": sum(before[problem]["right"] for problem in shared) / judged,
            "length": sum(before[p]["tokens"] * before[p]["samples"] for p in shared) / samples,
        }
    samples_of = dict(zip(after, group_by_problem(records), strict=True))  # both in the order of the prompts
    shared_records = [record for problem in shared for record in samples_of[problem]]
    return {
        "baseline": str(baseline),
        "difference": compare(baseline, run, level=settings.level, resamples=settings.bootstrap, seed=seed),
        "reference": base,
        "efficiency": asdict(compute_efficiency(shared_records, base, settings.aes)),
        "capability": _compare_capability([(before[p], after[p]) for p in shared], settings),
    }


def _compare_capability(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], settings: EvalSettings
) -> dict[str, Any] | None:
    """Compute accuracy_capability over problems with equally many judged samples in both runs.

    None without such problems.
    """
    comparable = [(a, b) for a, b in pairs if a["scored"] == b["scored"] and a["scored"]]
    if not comparable:
        return None
    n = [a["scored"] for a, _ in comparable]
    found = accuracy_capability(
        n,
        [a["right"] for a, _ in comparable],
        [b["right"] for _, b in comparable],
        ks=[k for k in settings.k if k <= min(n)],
        edges=settings.edges,
    )
    return {"problems": len(comparable), "left_out": len(pairs) - len(comparable), **asdict(found)}
