"""Sensitivity of the optimal policy to the rewards of a run (The Policy Cliff, arXiv 2507.20150).

Measures ties, and best answers that change with a small change of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluate.estimators import mean
from posttrain.evaluate.summary import group_by_problem
from posttrain.verify.stability import Stability, stability


def reward_stability(
    records: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float],
    *,
    share: float = 0.1,
    temperature: float = 0.1,
) -> dict[str, Any]:
    """Measure how ties and small changes of reward weights affect the best answers of problems.

    Returns {"problems", "tied", "cliff", "components": one row per reward}, over problems with several scored
    completions.

    Rewards are the weighted sums of the recorded scores. A component's row describes the effect of increasing its
    weight by `share`: flips, the share of problems whose best answer changes; soft_tv, the mean total variation between
    the policies of both rewards under a KL with coefficient `temperature`, and soft_bound, its upper bound. tied: share
    of problems with several best answers; cliff: tied, or a margin within twice the change. Rewards of 0 and 1 usually
    tie, and what breaks the ties (length, format) is where the policy can drift.
    """
    problems = [
        rows
        for rows in ([r["scores"] for r in p if r["reward"] is not None] for p in group_by_problem(records))
        if len(rows) > 1
    ]
    components = []
    tied = 0
    for moved in weights:
        found = [_compare_weights(rows, weights, moved, share, temperature) for rows in problems]
        tied = sum(effect.n_optimal > 1 for effect in found)
        components.append(
            {
                "reward": moved,
                "flips": mean([effect.hard_tv > 0 for effect in found]),
                "cliff": mean([effect.cliff for effect in found]),
                "soft_tv": mean([effect.soft_tv for effect in found]),
                "soft_bound": mean([effect.soft_bound for effect in found]),
                "margin": mean([effect.margin for effect in found]),
            }
        )
    return {
        "problems": len(problems),
        "tied": tied / len(problems) if problems else None,
        "share": share,
        "temperature": temperature,
        "components": components,
    }


def _compare_weights(
    rows: Sequence[Mapping[str, Any]], weights: Mapping[str, float], moved: str, share: float, temperature: float
) -> Stability:
    """Compare the rewards of a problem's completions before and after increasing one weight by `share`."""
    other = {**weights, moved: weights[moved] * (1 + share)}
    before, after = (
        [sum(w * (row.get(name) or 0.0) for name, w in each.items()) for row in rows] for each in (weights, other)
    )
    return stability(before, after, [0.0] * len(rows), temperature=temperature)
