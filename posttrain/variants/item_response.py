"""SEELE: shows each problem the share of its solution at which about half of its rollouts are correct."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from posttrain.batch import Variant
from posttrain.registry import register
from posttrain.variants.plan import Asked, Outcome

K, MU, B = (1.0, 60.0), (-1.5, 0.5), (0.0, 0.5)  # bounds of the fit
FEW = 10.0  # k of a curve through a single pair
CELLS, ROUNDS = 48, 6  # grid size per axis (k, mu), and number of refinements


class Curve(NamedTuple):
    """Accuracy as a function of the shown share p: b + (1 - b) / (1 + exp(-k (p + mu)))."""

    k: float
    mu: float
    b: float = 0.0

    def at(self, p: float) -> float:
        """Return the accuracy at share p."""
        return self.b + (1 - self.b) / (1 + math.exp(min(-self.k * (p + self.mu), 700.0)))

    def share(self, target: float = 0.5) -> float:
        """Return the share in [0, 1] with accuracy `target`; 0 for a target of b or less, 1 for a target of 1."""
        if target <= self.b:
            return 0.0
        if target >= 1:
            return 1.0
        odds = (1 - self.b) / (target - self.b) - 1
        return min(max(-self.mu - math.log(odds) / self.k, 0.0), 1.0)


@register(
    "prompt_variants",
    "item_response",
    paper="2509.06923",
    needs=("solution", "hinted", "begins_answer"),
    note=(
        "The authors fit with a trust region; the bounds of the fit, its weights by rollouts, the rounding of tokens,"
        " and the curve through the newest pair where fewer than three shares are known are ours."
    ),
)
class ItemResponse:
    """SEELE: `rounds` rounds of rollouts per problem, each with the share of the solution at which the predicted
    accuracy is `target`.

    p = share of the solution that is shown: the answer begins with its first p * tokens tokens, rounded half up, at
    most all but one; rewards read them, the policy loss does not (`regularisers: [{use: hint_nll}]` trains them a
    little). In the first round p shows all but one token, in a later epoch it is the last prediction. After each round
    a curve with three parameters is fitted to the accuracies so far. All rounds are one group.
    """

    def __init__(self, *, rounds: int = 4, target: float = 0.5) -> None:
        self.rounds, self.target = rounds, target

    def plan(self, asked: Asked) -> list[Variant]:
        """See `Planner.plan`."""
        done, length = len(asked.rounds), len(asked.solution)
        if length < 2:
            return [] if done else [Variant()]
        if done == self.rounds:
            return []
        known = (asked.memory or {}).get(asked.uid)
        rate = next_rate(asked.rounds, self.target) if done else first_rate(length) if known is None else known
        begin = asked.solution[: hint_tokens(rate, length)]
        return [
            Variant(
                f"round {done + 1}", begin=begin, begin_is="untrained", hinted=bool(begin), note={"rate": float(rate)}
            )
        ]

    def learn(self, memory: Mapping[str, float] | None, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """See `Planner.learn`: returns the predicted share for each problem."""
        rates = dict(memory or {})
        by_uid: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if "rate" in outcome.variant.note:
                by_uid.setdefault(outcome.uid, []).append(outcome)
        return rates | {uid: next_rate(rounds, self.target) for uid, rounds in by_uid.items()}


def next_rate(rounds: Sequence[Outcome], target: float) -> float:
    """Return the share for the next round, fitted to the rounds so far, whose notes hold their shares."""
    known = [(o.variant.note["rate"], o.accuracy, len(o.correct)) for o in rounds if o.accuracy is not None]
    if not known:
        return float(rounds[-1].variant.note["rate"])
    rates, accuracies, weights = zip(*known, strict=True)
    return fit_curve(rates, accuracies, weights).share(target)


def first_rate(length: int) -> float:
    """Return the share that shows all tokens but one; 0 for an empty solution."""
    return (length - 1) / length if length else 0.0


def hint_tokens(rate: float, length: int) -> int:
    """Return rate * length rounded half up, at most length - 1 and at least 0."""
    return max(min(math.floor(rate * length + 0.5), length - 1), 0)


def fit_curve(rates: Sequence[float], accuracy: Sequence[float], weights: Sequence[float] | None = None) -> Curve:
    """Fit the curve with the least weighted squares over (rate, mean accuracy at that rate), within the bounds.

    For each k and mu the best b is a ratio, so a grid over k and mu, refined around its best cell, finds the optimum.
    With fewer than three different rates: k 10, b 0, and the mu of the curve through the newest pair.
    """
    pairs: dict[float, tuple[float, float]] = {}
    for rate, value, weight in zip(rates, accuracy, weights or [1.0] * len(rates), strict=True):
        total, count = pairs.get(rate, (0.0, 0.0))
        pairs[rate] = (total + weight * value, count + weight)
    if len(pairs) < 3:
        newest = rates[-1]
        total, count = pairs[newest]
        value = min(max(total / count, 1e-6), 1 - 1e-6)
        mu = math.log(value / (1 - value)) / FEW - newest
        return Curve(FEW, min(max(mu, MU[0]), MU[1]))
    p, w = np.array(list(pairs)), np.array([count for _, count in pairs.values()])
    a = np.array([total / count for total, count in pairs.values()])
    (k_low, k_high), (mu_low, mu_high) = K, MU
    for _ in range(ROUNDS):
        ks, mus = np.meshgrid(np.linspace(k_low, k_high, CELLS), np.linspace(mu_low, mu_high, CELLS), indexing="ij")
        s = 1 / (1 + np.exp(-ks[..., None] * (p + mus[..., None])))
        free = 1 - s
        b = ((w * free * (a - s)).sum(-1) / np.maximum((w * free * free).sum(-1), 1e-12)).clip(*B)
        loss = (w * (s + b[..., None] * free - a) ** 2).sum(-1)
        at = np.unravel_index(np.argmin(loss), loss.shape)
        best = Curve(float(ks[at]), float(mus[at]), float(b[at]))
        k_step, mu_step = (k_high - k_low) / (CELLS - 1), (mu_high - mu_low) / (CELLS - 1)
        k_low, k_high = max(best.k - 2 * k_step, K[0]), min(best.k + 2 * k_step, K[1])
        mu_low, mu_high = max(best.mu - 2 * mu_step, MU[0]), min(best.mu + 2 * mu_step, MU[1])
    return best
