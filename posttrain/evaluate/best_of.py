"""Best of n: what picking the completion with the highest score is worth, for every n up to the samples there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.errors import RecipeError, did_you_mean
from posttrain.evaluate.estimators import Interval, bootstrap_ci
from posttrain.evaluate.summary import by_problem, verdict, with_bounds

Record = Mapping[str, Any]
SUM = "reward"  # the weighted sum of all components


def pick_weights(scores: Sequence[float], n: int) -> list[float]:
    """The chance of each of N completions to be the pick of n drawn from them without replacement.

    The pick has the highest score; of equal ones each is as likely. The completion at rank i (0 = highest) is the pick
    of C(N - 1 - i, n - 1) of the C(N, n) draws, so no draw has to be made. Raises ValueError for an n outside of 1 to
    the number of samples.
    """
    total = len(scores)
    if not 1 <= n <= total:
        raise ValueError(f"n must be from 1 to {total}, got {n}")
    by_rank = [n / total]
    for rank in range(total - 1):  # C(N - 2 - i, n - 1) / C(N - 1 - i, n - 1) = (N - n - i) / (N - 1 - i)
        by_rank.append(by_rank[-1] * (total - n - rank) / (total - 1 - rank))
    order = sorted(range(total), key=lambda i: -scores[i])
    weights = [0.0] * total
    for _, tied in itertools.groupby(enumerate(order), key=lambda ranked: scores[ranked[1]]):
        ranked = list(tied)
        share = math.fsum(by_rank[rank] for rank, _ in ranked) / len(ranked)
        for _, i in ranked:
            weights[i] = share
    return weights


def expected_pick(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """The expected value of the best-scored of n of the completions; with fewer than n, of all of them."""
    weights = pick_weights(scores, min(n, len(scores)))
    return math.fsum(w * v for w, v in zip(weights, values, strict=True))


def sizes(samples: int) -> list[int]:
    """1, 2, 4 ... and the number of samples itself."""
    return sorted({*(1 << power for power in range(samples.bit_length()) if 1 << power <= samples), samples})


def check_name(name: str, rewards: Sequence[str]) -> None:
    """Raises RecipeError where no reward is called so."""
    if name not in (*rewards, SUM):
        raise RecipeError(
            f"no reward is called `{name}`",
            where="eval.best_of",
            allowed=f"{', '.join(rewards)}, or `{SUM}` for their weighted sum",
            hint=did_you_mean(name, [*rewards, SUM]),
        )


def score_of(record: Record, by: str) -> float | None:
    """What the completion is picked by."""
    return record["reward"] if by == SUM else record["scores"].get(by)


def best_of(
    records: Sequence[Record], by: str, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> list[dict[str, Any]]:
    """A row for each n: `accuracy` of the pick by the score `by`, with its interval over problems, and mean `score`.

    Completions without a score, or whose correctness could not be judged, are no candidates. Accuracy is None where
    nothing is judged (`generate`); then rows are about the score only.
    """
    problems = [[r for r in samples if score_of(r, by) is not None] for samples in by_problem(records)]
    judged = any(r.get("correct") is not None for samples in problems for r in samples)
    if judged:
        problems = [[r for r in samples if r["correct"] is not None] for samples in problems]
    problems = [samples for samples in problems if samples]
    rows = []
    for n in sizes(max((len(samples) for samples in problems), default=0)):
        picked: dict[str, list[float]] = {"score": [], "accuracy": []}
        for samples in problems:
            scores = [float(score_of(r, by) or 0.0) for r in samples]
            picked["score"].append(expected_pick(scores, scores, n))
            if judged:
                picked["accuracy"].append(expected_pick(scores, [float(verdict(r) or 0) for r in samples], n))
        found = {k: _interval(v, level, resamples, seed) for k, v in picked.items() if v}
        rows.append({"n": n, "problems": len(problems), **{k: asdict(v) for k, v in found.items()}})
    return rows


def _interval(values: Sequence[float], level: float, resamples: int, seed: int) -> Interval:
    return bootstrap_ci(values, level=level, resamples=resamples, seed=seed)


def table(rows: Sequence[Mapping[str, Any]], by: str) -> dict[str, Any]:
    """`title`, `head` and `rows` for people."""
    judged = any("accuracy" in row for row in rows)
    shown = [
        [str(row["n"]), *([with_bounds(row["accuracy"])] if judged else []), f"{row['score']['mean']:.4g}"]
        for row in rows
    ]
    return {"title": f"Best of n by {by}", "head": ["n", *(["accuracy"] if judged else []), by], "rows": shown}


def best_records(records: Sequence[Record]) -> list[Record]:
    """The best-scored completion of each problem, the first of equal ones; a problem without any score has none."""
    found = []
    for samples in by_problem(records):
        scored = [r for r in samples if r["reward"] is not None]
        if scored:
            found.append(max(scored, key=lambda r: float(r["reward"])))
    return found
