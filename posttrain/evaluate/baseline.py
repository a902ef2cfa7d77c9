"""Comparison of an evaluation with an earlier one: difference, efficiency, and sources of the gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError
from posttrain.evaluate.compare import PROBLEMS, compare, read_problems
from posttrain.evaluate.efficiency import Efficiency, accuracy_capability, efficiency_metrics
from posttrain.evaluate.summary import Record, group_by_problem, verdict
from posttrain.recipe.eval_sections import EvalSettings
from posttrain.run.jsonl import read_rows


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

    Paths are relative to base_dir or the working directory. Raises RecipeError if it holds no evaluation.
    """
    for path in (base_dir / baseline, Path(baseline)):
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
