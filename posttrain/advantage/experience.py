"""An extractor that writes experience for an actor (Complementary RL, arXiv 2603.17621): who is compared with whom,
what a memory earns, how often it is trained on, and which one is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Table = Sequence[Sequence[float]]


def subgroup_advantages(rewards: Table, guided: Table) -> list[float]:
    """reward - mean of the rows of the same prompt with, or without, experience; flat, [B*G]. Alone in its part: 0."""
    found: list[float] = []
    for row, shown in zip(rewards, guided, strict=True):
        parts = {flag: [r for r, g in zip(row, shown, strict=True) if bool(g) == flag] for flag in (True, False)}
        means = {flag: sum(values) / len(values) for flag, values in parts.items() if values}
        found += [r - means[bool(g)] for r, g in zip(row, shown, strict=True)]
    return found


def memory_rewards(rewards: Table, guided: Table, memory: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """1, 0 or -1 for each memory that was shown: the sign of the mean of reward - mean of the unguided rewards of the
    same prompt (0 where there are none)."""
    gains: dict[str, list[float]] = {}
    for row, shown, names in zip(rewards, guided, memory, strict=True):
        plain = [r for r, g in zip(row, shown, strict=True) if not g]
        baseline = sum(plain) / len(plain) if plain else 0.0
        for reward, flag, name in zip(row, shown, names, strict=True):
            if flag and name is not None:
                gains.setdefault(name, []).append(reward - baseline)
    return {name: _sign(math.fsum(values) / len(values)) for name, values in gains.items()}


def _sign(value: float) -> float:
    return float((value > 0) - (value < 0))


def extractor_weights(
    train_count: Sequence[int], last_step: Sequence[int], step: int, *, cooldown: int = 1, power: float = 0.5
) -> list[float]:
    """Weight of each sample of the extractor: (1 + times trained)^-power, 0 within `cooldown` steps of its last use."""
    return [
        0.0 if step - last < cooldown else (1 + count) ** -power
        for count, last in zip(train_count, last_step, strict=True)
    ]


class Ranked(NamedTuple):
    """order: places of the candidates, the first to show first; scores: of the candidates, in their given order."""

    order: list[int]
    scores: list[float]


def rerank(retrieve_count: Sequence[int], recent: Sequence[float], *, diversity_lambda: float = 0.4) -> Ranked:
    """Candidates in order of similarity, those that were shown often or recently further back: score = -place -
    (lambda ln(1 + times shown) + 1 if recent); ties in their order."""
    scores = [
        -place - (diversity_lambda * math.log(1 + count) + float(bool(now)))
        for place, (count, now) in enumerate(zip(retrieve_count, recent, strict=True))
    ]
    return Ranked(sorted(range(len(scores)), key=lambda place: -scores[place]), scores)
