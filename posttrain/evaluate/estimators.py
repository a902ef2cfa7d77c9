"""Estimates over problems: pass@k, avg@k, majority vote, and their bootstrap intervals. Pure; numpy and stdlib only.

A problem is one prompt with its samples. Problems have equal weight, however many samples each has. `None` means "not
available" throughout: a sample that could not be scored, a problem without samples, a k larger than n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from posttrain.errors import count_noun

TiesRule = Literal["expected", "first"]

FEW_PROBLEMS = 10  # with fewer, bootstrap quantiles are coarse
_BLOCK = 2_000_000  # resampled indices in memory at a time


def pass_at_k(n: Sequence[int], c: Sequence[int], k: Sequence[int]) -> dict[int, float | None]:
    """Estimate the chance that at least one of k samples is right, averaged over problems (arXiv 2107.03374).

    Unbiased. n, c [M]: samples and right samples of each problem; k: the values wanted. Per problem 1 - C(n-c, k) /
    C(n, k), in exact integers. A k above the n of any problem gives None: pass@k is never extrapolated.
    """
    _same_length(n, c)
    return {size: mean(pass_contributions(n, c, size)) for size in k}


def pass_contributions(n: Sequence[int], c: Sequence[int], k: int) -> list[float] | None:
    """Compute the M per-problem values whose mean is pass@k; None if any problem has fewer than k samples.

    Raises ValueError for a k below 1, and if more are right than were sampled.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    for samples, right in zip(n, c, strict=True):
        if not 0 <= right <= samples:
            raise ValueError(f"{count_noun(samples, 'sample')} cannot have {right} right ones")
    if any(k > samples for samples in n):
        return None
    # Python divides two integers of any size with a single correct rounding.
    return [
        (math.comb(samples, k) - math.comb(samples - right, k)) / math.comb(samples, k)
        for samples, right in zip(n, c, strict=True)
    ]


@dataclass(frozen=True)
class Average:
    """Result of avg@k.

    `per_problem`: values of the problems with a scored sample, in order; left_out: number of problems without one.
    """

    per_problem: list[float]
    avg: float | None
    left_out: int = 0


def avg_at_k(correct: Sequence[Sequence[float | None]]) -> Average:
    """Compute the mean over problems of the mean of their samples ("mean@k").

    Unscored samples (None) are excluded from their row, and problems without a scored sample from the mean.
    """
    per_problem = drop_unscored([mean(drop_unscored(row)) for row in correct])
    return Average(per_problem, mean(per_problem), len(correct) - len(per_problem))


def drop_unscored(row: Sequence[float | None]) -> list[float]:
    """Return the values of a row that are neither None nor NaN."""
    return [float(value) for value in row if value is not None and not math.isnan(value)]


@dataclass(frozen=True)
class Vote:
    """Result of one problem's vote.

    `leaders`: the first member of each class with the most votes, in order of appearance.
    """

    leaders: list[int]
    classes: list[list[int]]  # positions of the voters of each class, in order of appearance
    majority: str | None  # stripped text of the first leader; None = no votes
    share: float | None  # votes of the largest class / votes


def vote(answers: Sequence[str | None], equal: Callable[[str, str], bool] | None = None) -> Vote:
    """Count the votes of one problem. Missing and blank answers do not vote.

    Classes are by equality of the stripped text, or of the pairs for which `equal` holds (joined transitively).
    """
    classes: list[list[int]] = []
    texts = [(answer or "").strip() for answer in answers]
    for position, text in enumerate(texts):
        if text:
            _add_vote(classes, position, texts, equal)
    if not classes:
        return Vote([], [], None, None)
    most = max(map(len, classes))
    leaders = [members[0] for members in classes if len(members) == most]
    return Vote(leaders, classes, texts[leaders[0]], most / sum(map(len, classes)))


def _add_vote(
    classes: list[list[int]], position: int, texts: Sequence[str], equal: Callable[[str, str], bool] | None
) -> None:
    """Add a position to the class it matches, merging all classes that match. Classes stay in order of appearance."""
    joined = [members for members in classes if any(_same(texts[position], texts[other], equal) for other in members)]
    if not joined:
        classes.append([position])
        return
    merged = joined[0]
    for members in joined[1:]:
        merged.extend(members)
        classes.remove(members)
    merged.append(position)
    merged.sort()


def _same(a: str, b: str, equal: Callable[[str, str], bool] | None) -> bool:
    return a == b or (equal is not None and equal(a, b))


@dataclass(frozen=True)
class Consensus:
    """cons@k. `share` [M]: share of the votes that the largest class got, a measure of confidence."""

    majority: list[str | None]
    per_problem: list[float]
    cons: float | None
    share: list[float | None] = field(default_factory=list)


def cons_at_k(
    answers: Sequence[Sequence[str | None]],
    gold: Sequence[str] | None = None,
    *,
    right: Sequence[Sequence[bool | None]] | None = None,
    k: int | None = None,
    ties_rule: TiesRule = "expected",
    equal: Callable[[str, str], bool] | None = None,
) -> Consensus:
    """Compute the accuracy of the majority answer of the first k samples (self-consistency, arXiv 2203.11171).

    answers [M][n]: extracted answers, None = none found. A class is right if it equals `gold` [M] (stripped text, or
    `equal`), or, if verdicts `right` [M][n] are given instead, if the first judged of its voters is right. ties_rule:
    `expected` = share of the tied leaders that are right; `first` = the tied leader seen first (the paper states no
    rule for ties). k: None or above n = all samples. A problem without votes gives 0 and majority None. Raises
    ValueError unless exactly one of gold answers and verdicts is given.
    """
    if (gold is None) == (right is None):
        raise ValueError("give either gold answers or verdicts")
    votes = [vote(row[:k], equal) for row in answers]
    values: list[float] = []
    for problem, result in enumerate(votes):
        if gold is not None:
            _same_length(gold, answers)
            expected, row = gold[problem].strip(), answers[problem]
            verdicts = [_same((row[i] or "").strip(), expected, equal) for i in result.leaders]
        else:
            assert right is not None
            _same_length(right[problem], answers[problem])
            verdicts = [_class_verdict(result, leader, right[problem]) for leader in result.leaders]
        considered = verdicts[:1] if ties_rule == "first" else verdicts
        values.append(sum(considered) / len(considered) if considered else 0.0)
    return Consensus([v.majority for v in votes], values, mean(values), [v.share for v in votes])


def _class_verdict(result: Vote, leader: int, right: Sequence[bool | None]) -> bool:
    """Return the first verdict among the voters of the leader's class; False if none was judged."""
    members = next(c for c in result.classes if c[0] == leader)
    return bool(next((right[i] for i in members if right[i] is not None), False))


def mean(values: Sequence[float] | None) -> float | None:
    """Return the mean; None without values."""
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True)
class Interval:
    """Mean over problems with its bootstrap interval. `note` says why the interval should not be trusted, or is ''."""

    mean: float | None
    low: float | None
    high: float | None
    level: float = 0.95
    problems: int = 0
    informative: bool = True
    note: str = ""


def has_interval(bounds: Mapping[str, Any]) -> bool:
    """Return whether {low, high} is an interval: one problem, or equal values, give none or one of zero width."""
    return bounds["low"] is not None and bool(bounds["low"] < bounds["high"])


def bootstrap_ci(
    values: Sequence[float],
    indices: Sequence[Sequence[int]] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Compute a percentile bootstrap over problems: linear quantiles (1-level)/2 and 1-(1-level)/2 of resampled means.

    values [M]: one number per problem (its samples are averaged first). indices [R][M]: the resamples; without them
    `resamples` rows are sampled from `seed`. The interval covers the choice of problems and, through their means,
    sampling noise, but not training seeds. One problem, or equal values, give zero width and `informative` False.
    Raises ValueError on NaN: exclude unscored problems first.
    """
    if not 0 <= level <= 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    data = np.asarray(list(values), dtype=np.float64)
    if data.size == 0:
        return Interval(None, None, None, level, 0, False, "no problems")
    if not np.isfinite(data).all():
        raise ValueError("values must be finite; exclude unscored problems")
    means = _means_of_indices(data, indices) if indices is not None else _resample_means(data, resamples, seed)
    tail = (1 - level) / 2
    low, high = (float(q) for q in np.quantile(means, [tail, 1 - tail], method="linear"))
    informative, note = _assess_values(data)
    return Interval(float(data.mean()), low, high, level, int(data.size), informative, note)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Compute the interval of mean(b - a) over the same problems, resampling both runs with the same indices."""
    _same_length(a, b)
    return bootstrap_ci([y - x for x, y in zip(a, b, strict=True)], level=level, resamples=resamples, seed=seed)


def _means_of_indices(data: np.ndarray, indices: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the means of values at the given rows of indices.

    Raises ValueError for an empty row or an index out of range.
    """
    rows = [np.asarray(row, dtype=np.int64) for row in indices]
    if not rows or any(row.size == 0 or row.min() < 0 or row.max() >= data.size for row in rows):
        raise ValueError(f"indices must be rows of positions from 0 to {data.size - 1}")
    return np.array([data[row].mean() for row in rows])


def _resample_means(data: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return the means of `resamples` bootstrap resamples, computed in blocks of at most _BLOCK indices."""
    generator = np.random.default_rng(seed % 2**64)  # numpy takes no negative seed
    rows = max(1, _BLOCK // data.size)
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([data[generator.integers(0, data.size, (block, data.size))].mean(axis=1) for block in blocks])


def _assess_values(data: np.ndarray) -> tuple[bool, str]:
    """Return whether a bootstrap interval of the values is informative, and a note about its quality."""
    if data.size == 1:
        return False, "not informative: one problem"
    if (data == data[0]).all():
        return False, "not informative: all values are equal"
    if data.size < FEW_PROBLEMS:
        return True, f"coarse: only {data.size} problems"
    return True, ""


def _same_length(a: Sequence[object], b: Sequence[object]) -> None:
    if len(a) != len(b):
        raise ValueError(f"lengths differ: {len(a)} and {len(b)}")
