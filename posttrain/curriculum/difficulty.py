"""Estimates of prompt difficulty from past rollouts: pass rates, bins of pass@k, empirical CDFs. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from posttrain.curriculum.protocol import Group

SLACK = 1e-9  # tolerance of pass-rate bounds
LARGEST_MARGIN = 0.49  # upper limit of `hysteresis`


def add_counts(tallies: Mapping[str, Sequence[float]], groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return tallies, uid -> [judged rollouts, correct ones] over all steps, with the rollouts of `groups` added."""
    counts = {uid: list(tally) for uid, tally in tallies.items()}
    for group in groups:
        known = [value for value in group.correct if value is not None]
        tally = counts.setdefault(group.uid, [0, 0])
        counts[group.uid] = [tally[0] + len(known), tally[1] + sum(known)]
    return counts


def estimate_pass_rate(tallies: Mapping[str, Sequence[float]], uid: str, unseen: float) -> float:
    """Return the pass rate of a prompt; `unseen` if none of its rollouts was judged."""
    judged, right = tallies.get(uid, (0, 0))
    return right / judged if judged else unseen


def in_band(pass_rate: float, low: float, high: float) -> bool:
    """Return whether low <= pass_rate <= high, with a tolerance for rounding at both ends (arXiv 2504.03380)."""
    return low - SLACK <= pass_rate <= high + SLACK


def learnability(pass_rate: float, beta: float = 1.0) -> tuple[float, float]:
    """Return (p (1-p) / (2 beta^2), KL(pi_init || pi*)) for binary rewards, with pi* ~ pi_init exp(r / beta).

    The first value is the second-order term of the KL in 1/beta. arXiv 2504.03380 states it as a lower bound; for
    p > 0.5 and a small beta the exact KL can be smaller.
    """
    p = pass_rate
    # log(1-p + p e^(1/beta)) - p/beta, without an overflow of e^(1/beta)
    high = max(math.log(1 - p) if p < 1 else -math.inf, (math.log(p) + 1 / beta) if p > 0 else -math.inf)
    parts = [math.log(1 - p)] if p < 1 else []
    parts += [math.log(p) + 1 / beta] if p > 0 else []
    exact = high + math.log(sum(math.exp(part - high) for part in parts)) - p / beta
    return p * (1 - p) / (2 * beta**2), exact


# --- bins of pass@k (arXiv 2601.19280, kishanpb/verl-gdro) ---


def any_correct(correct: Sequence[float | None]) -> int:
    """Return 1 if any rollout of a prompt is correct, else 0."""
    return int(any(value is not None and value > 0.5 for value in correct))


def windowed_mean(indicators: Sequence[int], length: int) -> float:
    """Return the mean of the last `length` indicators (0 = of all); 0 for none, so that unseen prompts are hardest."""
    recent = indicators[-length:] if length > 0 else indicators
    return sum(recent) / len(recent) if recent else 0.0


def assign_bin(
    estimate: float,
    edges: Sequence[float],
    *,
    previous: int | None = None,
    hysteresis: float = 0.0,
    exclude_extremes: bool = False,
) -> int:
    """Return the difficulty bin of an estimate: the number of edges that it reaches, 0 = hardest.

    A prompt leaves the bin `previous` only if its estimate passes the edge in between by `hysteresis` (at most 0.49).
    exclude_extremes: an estimate of 0 or 1 is in bin -1.

    The official code compares downward moves with another edge; with bins of equal width no downward move can then
    reach its own margin. Here one rule holds for both directions.
    """
    if exclude_extremes and not 0 < estimate < 1:
        return -1
    raw = bisect_right(list(edges), estimate)
    if previous is None or raw == previous:
        return raw
    boundary, margin = edges[min(previous, raw)], min(hysteresis, LARGEST_MARGIN)
    moves = estimate >= boundary + margin if raw > previous else estimate <= boundary - margin
    return raw if moves else previous


# --- the middle of the rewards (TACO, arXiv 2505.20777) ---


def ecdf(values: Sequence[float]) -> list[float]:
    """Compute the empirical CDF at each value: the share of values that are not larger."""
    ordered = sorted(values)
    return [bisect_right(ordered, value) / len(ordered) for value in values]


def select_middle(values: Sequence[float], low: float = 0.25, high: float = 0.75, min_keep: int = 0) -> list[bool]:
    """Return a mask of the values with low <= ecdf <= high. Equal values have the same ecdf, so a large block of ties
    may be excluded whole; if fewer than `min_keep` values pass, ranks replace the ecdf (ties: earlier ones first)."""
    kept = [low - SLACK <= share <= high + SLACK for share in ecdf(values)]
    if sum(kept) >= min_keep:
        return kept
    order = sorted(range(len(values)), key=lambda n: (values[n], n))
    ranks = {n: (rank + 1) / len(values) for rank, n in enumerate(order)}
    return [low - SLACK <= ranks[n] <= high + SLACK for n in range(len(values))]
