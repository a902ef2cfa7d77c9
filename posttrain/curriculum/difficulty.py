"""How hard prompts are, by what was seen of them: pass rates, bins of pass@k, empirical distributions. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from posttrain.curriculum.protocol import Group

SLACK = 1e-9  # of bounds on pass rates
LARGEST_MARGIN = 0.49  # of hysteresis


def add_counts(tallies: Mapping[str, Sequence[float]], groups: Sequence[Group]) -> dict[str, list[float]]:
    """uid -> [judged rollouts, right ones] over all steps, with those of `groups` added."""
    found = {uid: list(tally) for uid, tally in tallies.items()}
    for group in groups:
        known = [value for value in group.correct if value is not None]
        tally = found.setdefault(group.uid, [0, 0])
        found[group.uid] = [tally[0] + len(known), tally[1] + sum(known)]
    return found


def rate(tallies: Mapping[str, Sequence[float]], uid: str, unseen: float) -> float:
    """The pass rate of a prompt, `unseen` where none of its rollouts was judged."""
    judged, right = tallies.get(uid, (0, 0))
    return right / judged if judged else unseen


def in_band(pass_rate: float, low: float, high: float) -> bool:
    """low <= pass_rate <= high, both ends included with a slack for rounding (arXiv 2504.03380)."""
    return low - SLACK <= pass_rate <= high + SLACK


def learnability(pass_rate: float, beta: float = 1.0) -> tuple[float, float]:
    """(p (1-p) / (2 beta^2), KL(pi_init || pi*) of the tilted policy pi* ~ pi_init exp(r / beta)) for binary rewards.

    The first is the second-order term of the second in 1/beta (arXiv 2504.03380 states it as a lower bound; for p > 0.5
    and a small beta the exact value can be smaller).
    """
    p = pass_rate
    # log(1-p + p e^(1/beta)) - p/beta, without an overflow of e^(1/beta)
    high = max(math.log(1 - p) if p < 1 else -math.inf, (math.log(p) + 1 / beta) if p > 0 else -math.inf)
    parts = [math.log(1 - p)] if p < 1 else []
    parts += [math.log(p) + 1 / beta] if p > 0 else []
    exact = high + math.log(sum(math.exp(part - high) for part in parts)) - p / beta
    return p * (1 - p) / (2 * beta**2), exact


# --- bins of pass@k (arXiv 2601.19280, kishanpb/verl-gdro) ---


def any_right(correct: Sequence[float | None]) -> int:
    """Whether one of a prompt's rollouts is right, as 0 or 1."""
    return int(any(value is not None and value > 0.5 for value in correct))


def windowed_mean(indicators: Sequence[int], length: int) -> float:
    """Mean of the last `length` indicators, 0 = of all; 0 where there is none, so that unseen prompts are hardest."""
    recent = indicators[-length:] if length > 0 else indicators
    return sum(recent) / len(recent) if recent else 0.0


def bin_of(
    estimate: float,
    edges: Sequence[float],
    *,
    previous: int | None = None,
    hysteresis: float = 0.0,
    exclude_extremes: bool = False,
) -> int:
    """The difficulty bin of an estimate: how many edges it reaches, from 0 (hardest).

    A prompt leaves the bin `previous` only if it passes the edge on the way by `hysteresis` (0.49 at most).
    exclude_extremes: an estimate of 0 or 1 is bin -1.

    The official code takes another edge downwards for bins of equal width, under which no downward move can reach its
    own margin; one rule holds for both ways here.
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
    """For each value the share of values that are not larger."""
    ordered = sorted(values)
    return [bisect_right(ordered, value) / len(ordered) for value in values]


def middle(values: Sequence[float], low: float = 0.25, high: float = 0.75, min_keep: int = 0) -> list[bool]:
    """Which values have low <= ecdf <= high. Equal values have one ecdf, so that a large block may leave whole: where
    fewer than `min_keep` stay, values are taken by their rank instead (ties: the earlier first)."""
    kept = [low - SLACK <= share <= high + SLACK for share in ecdf(values)]
    if sum(kept) >= min_keep:
        return kept
    order = sorted(range(len(values)), key=lambda n: (values[n], n))
    ranks = {n: (place + 1) / len(values) for place, n in enumerate(order)}
    return [low - SLACK <= ranks[n] <= high + SLACK for n in range(len(values))]
