"""Stability of the policy that a reward induces: ties, and margins below the reward's noise (arXiv 2507.20150).

The checks and the bound are ours; the paper is theory: the map from rewards to the optimal policy is discontinuous
where the best answer is not unique, and smooth under a KL or entropy term, at the price of randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stability:
    """Result of `stability`.

    hard_tv, soft_tv: total variation between the policies under both rewards; soft_bound >= soft_tv. margin: best minus
    second-best reward, 0 if all are best. n_optimal: number of best answers. cliff: several answers are best, or the
    margin is within twice the largest change of a reward.
    """

    hard_tv: float
    soft_tv: float
    soft_bound: float
    margin: float
    n_optimal: int
    cliff: bool


def stability(
    rewards: Sequence[float],
    perturbed: Sequence[float],
    ref_logp: Sequence[float],
    *,
    temperature: float = 0.1,
    tie_tol: float = 1e-9,
) -> Stability:
    """Compare the policies induced by two measurements of the rewards of K candidate answers to one prompt.

    perturbed: rewards from another judge, seed or weighting. Hard policy: uniform over the answers within tie_tol of
    the best. Soft policy: proportional to exp(ref_logp + reward / temperature), where temperature is the KL
    coefficient. soft_bound = tanh(osc / (4 temperature)), with osc the range of the changes: the log density ratio of
    the two policies has range osc / temperature, and total variation is then largest for two atoms. Ties are normal for
    0/1 rewards: report them without a warning.
    """
    changes = [after - before for before, after in zip(rewards, perturbed, strict=True)]
    best = max(rewards)
    others = [r for r in rewards if best - r > tie_tol]
    n_optimal = len(rewards) - len(others)
    margin = best - max(others) if others else 0.0
    noise = max(abs(change) for change in changes)
    return Stability(
        hard_tv=_distance(_hard(rewards, tie_tol), _hard(perturbed, tie_tol)),
        soft_tv=_distance(_soft(rewards, ref_logp, temperature), _soft(perturbed, ref_logp, temperature)),
        soft_bound=math.tanh((max(changes) - min(changes)) / (4 * temperature)),
        margin=margin,
        n_optimal=n_optimal,
        cliff=n_optimal > 1 or (bool(others) and margin <= 2 * noise),
    )


def _hard(rewards: Sequence[float], tie_tol: float) -> list[float]:
    best = [max(rewards) - r <= tie_tol for r in rewards]
    return [x / sum(best) for x in best]


def _soft(rewards: Sequence[float], ref_logp: Sequence[float], temperature: float) -> list[float]:
    scores = [logp + r / temperature for logp, r in zip(ref_logp, rewards, strict=True)]
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


def _distance(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
