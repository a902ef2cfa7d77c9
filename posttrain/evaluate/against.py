"""An evaluation beside an earlier one of the same problems: difference, accuracy for tokens, where gains come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError
from posttrain.evaluate.compare import compare
from posttrain.evaluate.efficiency import Efficiency, accuracy_capability, efficiency_metrics
from posttrain.evaluate.sampling import PROBLEMS
from posttrain.evaluate.summary import Record, verdict
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


def located(baseline: str, base_dir: Path) -> Path:
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
    before, after = _rows(baseline), _rows(run)
    shared = [uid for uid in after if uid in before]
    samples = sum(before[uid]["samples"] for uid in shared)
    judged = sum(before[uid]["scored"] for uid in shared)
    base = None
    if judged:
        base = {
            "accuracy": sum(before[uid]["right"] for uid in shared) / judged,
            "length": sum(before[uid]["tokens"] * before[uid]["samples"] for uid in shared) / samples,
        }
    known = set(shared)
    own = [record for record in records if record["uid"] in known]
    return {
        "baseline": str(baseline),
        "difference": compare(baseline, run, level=settings.level, resamples=settings.bootstrap, seed=seed),
        "reference": base,
        "efficiency": asdict(efficiency(own, base, settings.aes)),
        "capability": _capability([(before[uid], after[uid]) for uid in shared], settings),
    }


def _rows(run: Path) -> dict[str, Mapping[str, Any]]:
    """uid -> row; of problems with the same uid, the first."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in read_rows(run / PROBLEMS):
        found.setdefault(row["uid"], row)
    return found


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
