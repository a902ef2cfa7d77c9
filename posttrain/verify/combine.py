"""Named scores -> one reward a row. Pure; the only place where components are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain import source_locations
from posttrain.errors import RewardError
from posttrain.recipe.section import OnNone

Scores = Sequence[float | None]
Gate = tuple[str, float]  # name of a component, its least score


def combine(
    components: Mapping[str, Scores],
    weights: Mapping[str, float],
    on_none: Mapping[str, OnNone],
    groups: Sequence[int],
    *,
    failed: Mapping[str, Sequence[bool]] | None = None,
    absent: Mapping[str, Sequence[bool]] | None = None,
    uids: Sequence[str] | None = None,
    clips: Mapping[str, Sequence[float]] | None = None,
    conditions: Mapping[str, Gate] | None = None,
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
    absent: where a component is not for the row, as one of another role: it is left out there.
    clips: scores are limited to [low, high] before they are weighted. conditions: where the component named there has
    no score or one below the least, this one counts as 0, whatever it is; where that one failed, nobody knows, and the
    row is not scored.
    Raises RewardError for a None of a component whose `on_none` is `error`.
    """
    conditions, failed, absent = conditions or {}, failed or {}, absent or {}
    limited = {**components, **{name: clip_scores(components[name], limits) for name, limits in (clips or {}).items()}}
    gated = {name: apply_gate(limited[name], components, gate) for name, gate in conditions.items()}
    components = {**limited, **gated}
    sums, counted, dropped = [0.0] * len(groups), [False] * len(groups), [False] * len(groups)
    for name, scores in components.items():
        if weights[name] == 0:
            continue
        depends_on = [name, conditions[name][0]] if name in conditions else [name]
        lost = [failed[one] for one in depends_on if one in failed]
        has_score = {g for g, score in zip(groups, scores, strict=True) if score is not None}
        for i, score in enumerate(scores):
            policy = on_none[name]
            if name in absent and absent[name][i]:
                continue
            if any(rows[i] for rows in lost):
                dropped[i] = True
            elif score is not None:
                sums[i] += weights[name] * score
                counted[i] = True
            elif policy == "error":
                row = source_locations.row(uids[i] if uids else i)
                raise RewardError(
                    f"reward {name} returned None for {row}", hint="its `on_none` is `error`; see the row, or change it"
                )
            elif policy == "zero":
                counted[i] = True
            elif policy == "skip_row" or (policy == "auto" and groups[i] in has_score):
                dropped[i] = True
    return [None if dropped[i] or not counted[i] else sums[i] for i in range(len(groups))]


def by_turn(parts: Sequence[Sequence[float]], limits: Sequence[float] | None) -> list[tuple[float, ...]]:
    """Numbers by turn of each row, each within [low, high]: a clip is of the turn, not of the sum."""
    if limits is None:
        return [tuple(row) for row in parts]
    low, high = limits
    return [tuple(min(max(part, low), high) for part in row) for row in parts]


def clip_scores(scores: Scores, limits: Sequence[float]) -> Scores:
    """The scores within [low, high]; None stays None."""
    low, high = limits
    return [None if score is None else min(max(score, low), high) for score in scores]


def apply_gate(scores: Scores, components: Mapping[str, Scores], gate: Gate) -> Scores:
    """The scores, 0 in rows where the gate's component has no score or one below its least."""
    name, least = gate
    return [
        score if key is not None and key >= least else 0.0 for score, key in zip(scores, components[name], strict=True)
    ]
