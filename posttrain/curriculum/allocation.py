"""Allocation of a fixed rollout budget over prompts. Pure functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from statistics import stdev

FLOOR = 1e-12  # lower bound of an arm's probability


# --- XRPO (arXiv 2510.06672) ---


def half_width(count: int, std: float, alpha: float) -> float:
    """Compute half the width of the confidence interval of a mean: t_{1-alpha/2, count-1} * std / sqrt(count)."""
    if std == 0:
        return 0.0
    if count < 2:  # no interval
        return math.inf
    return t_quantile(1 - alpha / 2, count - 1) * std / math.sqrt(count)


def priority(count: int, std: float, total: int, *, alpha: float = 0.05, explore: float = 0.1) -> tuple[float, float]:
    """Return (decrease of the half-width by one more rollout, bonus explore * sqrt(ln(1 + total) / count)); a prompt's
    priority is the sum of the two."""
    bonus = explore * math.sqrt(math.log(1 + total) / count) if count else math.inf
    return half_width(count, std, alpha) - half_width(max(count, 1) + 1, std, alpha), bonus


def grant_rollouts(
    counts: Sequence[int],
    stds: Sequence[float],
    *,
    budget: int,
    total: int | None = None,
    alpha: float = 0.05,
    explore: float = 0.1,
    most: int | None = None,
    at_once: int = 1,
) -> list[int]:
    """Return the number of additional rollouts per prompt, granted `at_once` at a time to the highest priority (ties:
    the first).

    counts: rollouts so far; prompts with fewer than 2 have no interval and come first. stds: standard deviations of
    their rewards, held fixed. total: rollouts so far over all prompts, default sum(counts); grows with each grant.
    most: maximum rollouts of one prompt; once all prompts have it, the remaining budget is not spent.
    """
    now, given = list(counts), [0] * len(counts)
    total = sum(counts) if total is None else total
    while budget > 0:
        free = [n for n in range(len(now)) if most is None or now[n] < most]
        if not free:
            break

        def urgency(n: int, total: int = total) -> float:
            if now[n] < 2:
                return math.inf
            return sum(priority(now[n], stds[n], total, alpha=alpha, explore=explore))

        best = max(free, key=lambda n: (urgency(n), -n))
        count = min(at_once, budget, most - now[best] if most is not None else budget)
        now[best], given[best] = now[best] + count, given[best] + count
        total, budget = total + count, budget - count
    return given


def reward_std(rewards: Sequence[float | None]) -> float:
    """Compute the standard deviation (ddof 1) of the known rewards; 0 for fewer than two."""
    known = [value for value in rewards if value is not None]
    return stdev(known) if len(known) > 1 else 0.0


def t_quantile(share: float, freedom: int) -> float:
    """Compute the quantile of Student's t distribution: t_quantile(0.975, 3) = 3.182446. share > 0.5."""
    low, high = 0.0, 1.0
    while _t_cdf(high, freedom) < share:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, freedom: int) -> float:
    """Compute P(T <= t) for t >= 0 and integer degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        term = total = cosine if freedom > 1 else 0.0
        for k in range(2, freedom - 1, 2):
            term *= k / (k + 1) * cosine * cosine
            total += term
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term = total = 1.0
        for k in range(1, freedom - 1, 2):
            term *= k / (k + 1) * cosine * cosine
            total += term
        inside = sine * total
    return 0.5 + inside / 2


# --- GDRO's rollout player (arXiv 2601.19280, kishanpb/verl-gdro) ---


def arm_probabilities(scores: Sequence[float], *, eta: float = 0.65, gamma: float = 0.01) -> list[float]:
    """Return the probability of each arm: (1 - gamma) softmax(eta * score) + gamma / arms."""
    top = max(scores)
    weights = [math.exp(eta * (score - top)) for score in scores]
    return [(1 - gamma) * weight / sum(weights) + gamma / len(scores) for weight in weights]


def choose_arms(
    arms: Sequence[int],
    probabilities: Mapping[str, Sequence[float]],
    counts: Mapping[str, int],
    budget: int,
) -> dict[str, int]:
    """Choose one arm (rollouts per prompt) for each bin: the largest sum of log-probabilities that spends the budget.

    counts: prompts of each bin; a choice spends sum counts[b] * arm[b]. If no choice spends exactly the budget, the
    closest total is taken, and among equally close ones the most likely. Exact, by dynamic programming over totals.
    """
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    bins = list(counts)
    for name in bins:
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for total, (likely, chosen) in reached.items():
            for arm, probability in zip(arms, probabilities[name], strict=True):
                new, log = total + counts[name] * arm, likely + math.log(max(probability, FLOOR))
                if new not in further or log > further[new][0]:
                    further[new] = (log, (*chosen, arm))
        reached = further
    best = min(reached, key=lambda total: (abs(total - budget), -reached[total][0]))
    return dict(zip(bins, reached[best][1], strict=True))


def update_arm_scores(
    arms: Sequence[int],
    scores: Mapping[str, Sequence[float]],
    chosen: Mapping[str, int],
    losses: Mapping[str, float],
    *,
    mu: float,
    mean: float,
    mode: str = "code",
) -> dict[str, list[float]]:
    """Return the arm scores after a step: the score of the arm that a bin used changes by the bin's mean loss.

    mode `code`: + loss - mu * (arm - mean); `paper`: - (loss + mu * arm). The loss has opposite signs because the
    official code takes minus the loss as the utility of a bin. Bins without a loss do not change.
    """
    updated = {name: [float(score) for score in values] for name, values in scores.items()}
    for name, loss in losses.items():
        if name in chosen and name in updated and chosen[name] in arms:
            index, arm = list(arms).index(chosen[name]), chosen[name]
            updated[name][index] += loss - mu * (arm - mean) if mode == "code" else -(loss + mu * arm)
    return updated


def arms_between(least: int, most: int) -> list[int]:
    """Return the arms: least, least + 1, ..., most rollouts per prompt."""
    return list(range(least, most + 1))


def budget_for(mean: float, counts: Mapping[str, int]) -> int:
    """Return the rollout budget of a step with `mean` rollouts per prompt on average."""
    return round(mean * sum(counts.values()))


def count_rollouts(counts: Mapping[str, int], chosen: Mapping[str, int]) -> int:
    """Compute the rollouts of a step: the sum over bins of prompts times rollouts per prompt."""
    return sum(count * chosen[name] for name, count in counts.items())


def shadow_price(
    mu: float, counts: Mapping[str, int], chosen: Mapping[str, int], *, mean: float, dual_lr: float = 0.05
) -> float:
    """Return mu + dual_lr * (mean rollouts per prompt - the mean that the budget allows); may be negative."""
    return mu + dual_lr * (count_rollouts(counts, chosen) / sum(counts.values()) - mean)


def allocate_by_variance(rates: Sequence[float], *, budget: int, least: int = 2, most: int = 12) -> list[int]:
    """Return rollouts n_i in least..most that sum to `budget` and minimize sum p_i (1-p_i) / n_i; exact.

    Greedy: the next rollout goes to the largest v/n - v/(n+1); ties: to the prompt with fewer rollouts, then to the
    first. Once all prompts have `most`, the remaining budget is not spent. Raises ValueError if budget < least *
    prompts.
    """
    if budget < least * len(rates):
        raise ValueError(f"a budget of {budget} rollouts is less than {least} for each of {len(rates)} prompts")
    counts, variances = [least] * len(rates), [p * (1 - p) for p in rates]
    queue = [(-v / least + v / (least + 1), least, n) for n, v in enumerate(variances) if least < most]
    heapq.heapify(queue)
    for _ in range(budget - least * len(rates)):
        if not queue:
            break
        _, count, n = heapq.heappop(queue)
        counts[n] = count = count + 1
        if count < most:
            v = variances[n]
            heapq.heappush(queue, (-v / count + v / (count + 1), count, n))
    return counts
