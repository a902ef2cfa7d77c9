"""Stored rollouts that join a step: a success for a group that failed, samples by the size of their advantage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple


class Injected(NamedTuple):
    """replaced [B]: 1 where rollout 0 gave way; rewards [B][G] afterwards; buffer: uid -> rewards, the oldest first."""

    replaced: list[int]
    rewards: list[list[float]]
    buffer: dict[str, list[float]]


def inject_successes(
    rewards: Sequence[Sequence[float]],
    uids: Sequence[str],
    buffer: Mapping[str, Sequence[float]],
    pick: Sequence[int],
    *,
    capacity: int = 8,
    std_max: float = 0.05,
    mean_max: float = 0.2,
    success_min: float = 0.1,
) -> Injected:
    """ARPO (arXiv 2505.16282): a stored success of the task takes the place of rollout 0 of a group that failed.

    A group has failed if its rewards have a population std below std_max and a mean below mean_max. pick [B]: which
    stored success is drawn. Afterwards the fresh rollouts with a reward above success_min are stored, `capacity` a
    task, the oldest dropped; what was replayed is not stored again.
    """
    after = [list(row) for row in rewards]
    replaced = [0] * len(after)
    for place, (row, uid) in enumerate(zip(after, uids, strict=True)):
        stored = buffer.get(uid, ())
        if stored and pstdev(row) < std_max and fmean(row) < mean_max:
            row[0], replaced[place] = stored[pick[place]], 1
    kept = {uid: list(values) for uid, values in buffer.items()}
    for row, uid, gone in zip(after, uids, replaced, strict=True):
        if fresh := [reward for reward in row[gone:] if reward > success_min]:
            kept[uid] = [*kept.get(uid, []), *fresh]
    return Injected(replaced, after, {uid: values[-capacity:] for uid, values in kept.items()})


def draw_probabilities(advantages: Sequence[float], *, alpha: float = 1.0) -> list[float]:
    """|A|^alpha / sum |A|^alpha of the samples in a buffer (Skywork R1V2's selective sample buffer); all 0 where none
    has an advantage: nothing is drawn."""
    weights = [abs(a) ** alpha if a else 0.0 for a in advantages]
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights
