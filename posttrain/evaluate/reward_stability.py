"""How fragile the policy is that the rewards of a run ask for (The Policy Cliff, arXiv 2507.20150): ties, and best
answers that change when a weight moves a little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluate.summary import group_by_problem
from posttrain.verify.stability import Stability, stability


def reward_stability(
    records: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float],
    *,
    share: float = 0.1,
    temperature: float = 0.1,
) -> dict[str, Any]:
    """{"problems", "tied", "cliff", "components": one row a reward} of problems with several scored completions.

    Rewards are the weighted sums of the recorded scores. A component's row says what becomes of the problems when its
    weight grows by `share`: flips, how many get another best answer; soft_tv, the mean total variation between the
    policies of both rewards under a KL with coefficient `temperature`, and soft_bound, which it cannot exceed. tied: of
    problems whose best answers are several; cliff: tied, or a margin within twice the change. For rewards of 0 and 1
    ties are the rule, and what breaks them (length, format) is where the policy is free to drift.
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
        tied = sum(one.n_optimal > 1 for one in found)
        components.append(
            {
                "reward": moved,
                "flips": _mean([one.hard_tv > 0 for one in found]),
                "cliff": _mean([one.cliff for one in found]),
                "soft_tv": _mean([one.soft_tv for one in found]),
                "soft_bound": _mean([one.soft_bound for one in found]),
                "margin": _mean([one.margin for one in found]),
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
    other = {**weights, moved: weights[moved] * (1 + share)}
    before, after = (
        [sum(w * (row.get(name) or 0.0) for name, w in each.items()) for row in rows] for each in (weights, other)
    )
    return stability(before, after, [0.0] * len(rows), temperature=temperature)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
