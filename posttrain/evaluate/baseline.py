"""An evaluation beside an earlier one of the same problems: difference, accuracy for tokens, where gains come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError
from posttrain.evaluate.compare import PROBLEMS, compare, problems_of
from posttrain.evaluate.efficiency import Efficiency, accuracy_capability, efficiency_metrics
from posttrain.evaluate.summary import Record, by_problem, verdict
from posttrain.recipe.eval_sections import EvalSettings
from posttrain.run.jsonl import read_rows


def efficiency(records: Sequence[Record], base: Mapping[str, float] | None, weights: Sequence[float]) -> Efficiency:
    """efficiency_metrics of the judged samples; base: `accuracy` and `length` of the baseline, or None."""
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
    """The baseline's run directory, given as that or as its problems.jsonl: beside the recipe, or from here.

    Raises RecipeError if it holds no evaluation.
    """
    for place in (base_dir / baseline, Path(baseline)):
        folder = place.parent if place.name == PROBLEMS else place
        if "accuracy" in next(iter(read_rows(folder / PROBLEMS)), {}):
            return folder
    raise RecipeError(f"{baseline} holds no finished evaluation ({PROBLEMS})", where="eval.baseline")


def against(baseline: Path, run: Path, records: Sequence[Record], settings: EvalSettings, seed: int) -> dict[str, Any]:
    """What the summary says of a baseline, over the problems that both have.

    difference: paired interval of accuracy. efficiency: with the baseline as the reference line. capability: buckets of
    difficulty and the split of the gain, over problems with as many judged samples in both runs (pass@k for the k of
    the recipe that they allow); None if there are none.
    """
    before, after = problems_of(baseline), problems_of(run)
    shared = [problem for problem in after if problem in before]
    samples = sum(before[problem]["samples"] for problem in shared)
    judged = sum(before[problem]["scored"] for problem in shared)
    base = None
    if judged:
        base = {
            "accuracy": sum(before[problem]["right"] for problem in shared) / judged,
            "length": sum(before[p]["tokens"] * before[p]["samples"] for p in shared) / samples,
        }
    samples_of = dict(zip(after, by_problem(records), strict=True))  # both in the order of the prompts
    own = [record for problem in shared for record in samples_of[problem]]
    return {
        "baseline": str(baseline),
        "difference": compare(baseline, run, level=settings.level, resamples=settings.bootstrap, seed=seed),
        "reference": base,
        "efficiency": asdict(efficiency(own, base, settings.aes)),
        "capability": _capability([(before[p], after[p]) for p in shared], settings),
    }


def _capability(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], settings: EvalSettings
) -> dict[str, Any] | None:
    alike = [(a, b) for a, b in pairs if a["scored"] == b["scored"] and a["scored"]]
    if not alike:
        return None
    n = [a["scored"] for a, _ in alike]
    found = accuracy_capability(
        n,
        [a["right"] for a, _ in alike],
        [b["right"] for _, b in alike],
        ks=[k for k in settings.k if k <= min(n)],
        edges=settings.edges,
    )
    return {"problems": len(alike), "left_out": len(pairs) - len(alike), **asdict(found)}
