"""Estimates over problems: pass@k, avg@k, majority vote, and their bootstrap intervals. Pure; numpy and stdlib only.

A problem is one prompt with its samples. Problems weigh the same, however many samples each has. `None` stands for
"not available" throughout: a sample that could not be scored, a problem without samples, a k that n cannot carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from posttrain.errors import count_noun

TiesRule = Literal["expected", "first"]

FEW_PROBLEMS = 10  # below this the bootstrap's quantiles are coarse
_BLOCK = 2_000_000  # resampled indices held at once


def pass_at_k(n: Sequence[int], c: Sequence[int], k: Sequence[int]) -> dict[int, float | None]:
    """Unbiased chance that at least one of k samples is right, mean over problems (arXiv 2107.03374).

    n, c [M]: samples and right samples of each problem; k: the values wanted. Per problem 1 - C(n-c, k) / C(n, k), in
    exact integers. A k above the n of any problem gives None: it is never extrapolated.
    """
    _same_length(n, c)
    return {size: mean(pass_contributions(n, c, size)) for size in k}


def pass_contributions(n: Sequence[int], c: Sequence[int], k: int) -> list[float] | None:
    """The M per-problem values whose mean is pass@k; None if any problem has fewer than k samples.

    Raises ValueError for a k below 1, and where more are right than were sampled.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    for samples, right in zip(n, c, strict=True):
        if not 0 <= right <= samples:
            raise ValueError(f"{right} right of {count_noun(samples, 'sample')}")
    if any(k > samples for samples in n):
        return None
    # Integer numerator over integer denominator: Python divides them with one correct rounding, however large.
    return [
        (math.comb(samples, k) - math.comb(samples - right, k)) / math.comb(samples, k)
        for samples, right in zip(n, c, strict=True)
    ]


@dataclass(frozen=True)
class Average:
    """avg@k. `per_problem`: of the problems with a scored sample, in order; left_out: how many have none."""

    per_problem: list[float]
    avg: float | None
    left_out: int = 0


def avg_at_k(correct: Sequence[Sequence[float | None]]) -> Average:
    """Mean over problems of the mean of their samples ("mean@k"). Unscored samples (None) are left out of their row,
    problems without a scored one of the mean."""
    per_problem = drop_unscored([mean(drop_unscored(row)) for row in correct])
    return Average(per_problem, mean(per_problem), len(correct) - len(per_problem))


def drop_unscored(row: Sequence[float | None]) -> list[float]:
    """The values of a row that are there: neither None nor NaN."""
    return [float(value) for value in row if value is not None and not math.isnan(value)]


@dataclass(frozen=True)
class Vote:
    """The outcome of one problem's vote. `leaders`: the first member of each class of most votes, first seen first."""

    leaders: list[int]
    classes: list[list[int]]  # positions of the voters of each class, first seen first
    majority: str | None  # stripped text of the first leader; None = nobody voted
    share: float | None  # votes of the largest class / votes


def vote(answers: Sequence[str | None], equal: Callable[[str, str], bool] | None = None) -> Vote:
    """Count the votes of one problem. Missing and blank answers do not vote.

    Classes are by equality of the stripped text, or by the pairs that `equal` holds for (joined transitively).
    """
    classes: list[list[int]] = []
    texts = [(answer or "").strip() for answer in answers]
    for position, text in enumerate(texts):
        if text:
            _join(classes, position, texts, equal)
    if not classes:
        return Vote([], [], None, None)
    most = max(map(len, classes))
    leaders = [members[0] for members in classes if len(members) == most]
    return Vote(leaders, classes, texts[leaders[0]], most / sum(map(len, classes)))


def _join(
    classes: list[list[int]], position: int, texts: Sequence[str], equal: Callable[[str, str], bool] | None
) -> None:
    """Put a position into the class it matches; classes that it connects become one. Order of first sight is kept."""
    joined = [members for members in classes if any(_same(texts[position], texts[other], equal) for other in members)]
    if not joined:
        classes.append([position])
        return
    home = joined[0]
    for members in joined[1:]:
        home.extend(members)
        classes.remove(members)
    home.append(position)
    home.sort()


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
    """Accuracy of the majority answer of the first k samples (self-consistency, arXiv 2203.11171).

    answers [M][n]: extracted answers, None = none found. A class is right if it equals `gold` [M] (stripped text, or
    `equal`), or, where verdicts `right` [M][n] are given instead, if the first judged of its voters is right.
    ties_rule: `expected` = share of the tied leaders that are right; `first` = the tied leader seen first (the rule for
    ties is ours, the paper states none). k: None or above n = all samples. No vote at all gives 0 and majority None.
    Raises ValueError unless either gold answers or verdicts are given.
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
    members = next(c for c in result.classes if c[0] == leader)
    return bool(next((right[i] for i in members if right[i] is not None), False))


def mean(values: Sequence[float] | None) -> float | None:
    """The mean; None where there is nothing."""
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True)
class Interval:
    """A mean over problems with its bootstrap interval. `note` says why an interval should not be trusted, or is ''."""

    mean: float | None
    low: float | None
    high: float | None
    level: float = 0.95
    problems: int = 0
    informative: bool = True
    note: str = ""


def bootstrap_ci(
    values: Sequence[float],
    indices: Sequence[Sequence[int]] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap over problems: quantiles (1-level)/2 and 1-(1-level)/2 of resampled means, linear between.

    values [M]: one number a problem (its samples stay together in their mean). indices [R][M]: the resamples; without
    them `resamples` rows are drawn from `seed`. The interval covers the choice of problems and, through their means,
    sampling noise; it says nothing about training seeds. One problem, or equal values, give zero width and
    `informative` False. Raises ValueError on NaN: leave unscored problems out first.
    """
    if not 0 <= level <= 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    data = np.asarray(list(values), dtype=np.float64)
    if data.size == 0:
        return Interval(None, None, None, level, 0, False, "no problems")
    if not np.isfinite(data).all():
        raise ValueError("values must be finite; leave unscored problems out")
    means = _given_means(data, indices) if indices is not None else _drawn_means(data, resamples, seed)
    tail = (1 - level) / 2
    low, high = (float(q) for q in np.quantile(means, [tail, 1 - tail], method="linear"))
    informative, note = _trust(data)
    return Interval(float(data.mean()), low, high, level, int(data.size), informative, note)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Interval of mean(b - a) over the same problems: both runs are resampled with the same indices."""
    _same_length(a, b)
    return bootstrap_ci([y - x for x, y in zip(a, b, strict=True)], level=level, resamples=resamples, seed=seed)


def _given_means(data: np.ndarray, indices: Sequence[Sequence[int]]) -> np.ndarray:
    rows = [np.asarray(row, dtype=np.int64) for row in indices]
    if not rows or any(row.size == 0 or row.min() < 0 or row.max() >= data.size for row in rows):
        raise ValueError(f"indices must be rows of positions from 0 to {data.size - 1}")
    return np.array([data[row].mean() for row in rows])


def _drawn_means(data: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed % 2**64)  # numpy takes no negative seed
    rows = max(1, _BLOCK // data.size)
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([data[generator.integers(0, data.size, (block, data.size))].mean(axis=1) for block in blocks])


def _trust(data: np.ndarray) -> tuple[bool, str]:
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
