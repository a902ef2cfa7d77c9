"""Named scores -> one reward a row. Pure; the only place where components are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.errors import RewardError
from posttrain.recipe.section import OnNone

Scores = Sequence[float | None]


def combine(
    components: Mapping[str, Scores],
    weights: Mapping[str, float],
    on_none: Mapping[str, OnNone],
    groups: Sequence[int],
    *,
    failed: Mapping[str, Sequence[bool]] | None = None,
    uids: Sequence[str] | None = None,
) -> list[float | None]:
    """Weighted sum of the components [N]; None = the row cannot be scored (advantage 0, outside all statistics).

    Components of weight 0 are logged only. A score of None means that the component does not apply to the row:
      auto              nobody in the group has a score: the component is left out for the group; some have: those rows
                        without one are not scored
      skip_row          the row is not scored
      ignore_component  the component is left out for the row
      zero              counts as 0
      error             RewardError
    failed: where a component raised or timed out. Such a row is never scored, whatever `on_none` says, and does not
    count when `auto` asks whether somebody has a score. A row for which every component was left out is not scored.
    """
    failed = failed or {}
    rows = len(groups)
    sums = [0.0] * rows
    counted = [False] * rows
    dropped = [False] * rows
    for name, scores in components.items():
        weight = weights[name]
        if weight == 0:
            continue
        lost = failed.get(name) or [False] * rows
        has_score = {g for g, score in zip(groups, scores, strict=True) if score is not None}
        for i, score in enumerate(scores):
            if lost[i]:
                dropped[i] = True
            elif score is not None:
                sums[i] += weight * score
                counted[i] = True
            else:
                policy = on_none[name]
                if policy == "error":
                    row = uids[i] if uids else str(i)
                    raise RewardError(
                        f"reward {name} returned None for row {row}",
                        hint="its `on_none` is `error`; see the row, or change it",
                    )
                if policy == "zero":
                    counted[i] = True
                elif policy == "skip_row" or (policy == "auto" and groups[i] in has_score):
                    dropped[i] = True
    return [None if dropped[i] or not counted[i] else sums[i] for i in range(rows)]
