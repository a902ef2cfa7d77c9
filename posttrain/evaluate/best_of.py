"""Best of n: the expected value of picking the completion with the highest score, for n up to the number of samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.errors import RecipeError, did_you_mean
from posttrain.evaluate.estimators import bootstrap_ci
from posttrain.evaluate.summary import format_interval, group_by_problem, verdict

Record = Mapping[str, Any]
WEIGHTED_SUM = "reward"  # name of the weighted sum of all reward components


def pick_weights(scores: Sequence[float], n: int) -> list[float]:
    """Compute the probability of each of N completions to be picked from n sampled without replacement.

    The pick has the highest score; ties are equally likely. The completion at rank i (0 = highest) is the pick of C(N -
    1 - i, n - 1) of the C(N, n) subsets, so no sampling is needed. Raises ValueError for an n outside of 1 to the
    number of samples.
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
    """Compute the expected value of the best-scored of n completions; with fewer than n completions, of all of them."""
    weights = pick_weights(scores, min(n, len(scores)))
    return math.fsum(w * v for w, v in zip(weights, values, strict=True))


def candidate_counts(samples: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of samples itself."""
    return sorted({*(1 << power for power in range(samples.bit_length()) if 1 << power <= samples), samples})


def check_reward_name(name: str, rewards: Sequence[str]) -> None:
    """Raise RecipeError if no reward has this name."""
    if name not in (*rewards, WEIGHTED_SUM):
        raise RecipeError(
            f"no reward is called `{name}`",
            where="eval.best_of",
            allowed=f"{', '.join(rewards)}, or `{WEIGHTED_SUM}` for their weighted sum",
            hint=did_you_mean(name, [*rewards, WEIGHTED_SUM]),
        )


def get_pick_score(record: Record, by: str) -> float | None:
    """Return the score that a completion is picked by."""
    return record["reward"] if by == WEIGHTED_SUM else record["scores"].get(by)


def best_of(
    records: Sequence[Record], by: str, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> list[dict[str, Any]]:
    """Compute the accuracy and mean score of the best of n completions by the score `by`, one row for each n.

    `accuracy` has an interval over problems. Completions without a score, or whose correctness could not be judged, are
    not candidates. Without judged completions (`generate`) rows have no accuracy, only the score.
    """
    problems = [[r for r in samples if get_pick_score(r, by) is not None] for samples in group_by_problem(records)]
    judged = any(r.get("correct") is not None for samples in problems for r in samples)
    if judged:
        problems = [[r for r in samples if r["correct"] is not None] for samples in problems]
    problems = [samples for samples in problems if samples]
    rows = []
    for n in candidate_counts(max((len(samples) for samples in problems), default=0)):
        picked: dict[str, list[float]] = {"score": [], "accuracy": []}
        for samples in problems:
            scores = [float(get_pick_score(r, by) or 0.0) for r in samples]
            picked["score"].append(expected_pick(scores, scores, n))
            if judged:
                picked["accuracy"].append(expected_pick(scores, [float(verdict(r) or 0) for r in samples], n))
        intervals = {
            name: asdict(bootstrap_ci(values, level=level, resamples=resamples, seed=seed))
            for name, values in picked.items()
            if values
        }
        rows.append({"n": n, "problems": len(problems), **intervals})
    return rows


def make_best_of_table(rows: Sequence[Mapping[str, Any]], by: str) -> dict[str, Any]:
    """Format the rows of `best_of` as a table with `title`, `head` and `rows`."""
    judged = any("accuracy" in row for row in rows)
    shown = [
        [str(row["n"]), *([format_interval(row["accuracy"])] if judged else []), f"{row['score']['mean']:.4g}"]
        for row in rows
    ]
    return {"title": f"Best of n by {by}", "head": ["n", *(["accuracy"] if judged else []), by], "rows": shown}


def pick_best_records(records: Sequence[Record]) -> list[Record]:
    """Return the best-scored completion of each problem, the first of ties; a problem without scores has none."""
    picked = []
    for samples in group_by_problem(records):
        scored = [r for r in samples if r["reward"] is not None]
        if scored:
            picked.append(max(scored, key=lambda r: float(r["reward"])))
    return picked
