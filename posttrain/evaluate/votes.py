"""Answers that the verifier calls equal vote together: `0.5` and `1/2`.

The correctness reward itself is asked, in its worker processes and under its limits, with one answer as the gold of the
other's completion. So it is asked only where it looks for an answer (`extract`) and reads the column `answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.verify.score import Sample, Scorer, get_score

GOLD_COLUMN = "answer"
MAX_CLASSES = 8  # answers of a problem that others are compared with; further ones vote by their text


def match_votes(
    scorer: Scorer, samples: Sequence[Sample], answers: Sequence[str | None], correct: Sequence[bool | None]
) -> list[str | None]:
    """What each sample votes for: the first answer of its problem that is equal to its own, by text or verifier.

    Answers are compared with the first of each class, never all with all, and only where both are right or both wrong.
    A comparison that fails or is late joins nothing.
    """
    votes = [answer.strip() if answer else answer for answer in answers]
    reward = scorer.rewards[scorer.correctness]
    if GOLD_COLUMN not in reward.columns:
        return votes
    first: dict[tuple[int, str], int] = {}  # problem and text -> its first sample
    for i, (sample, vote) in enumerate(zip(samples, votes, strict=True)):
        if vote:
            first.setdefault((sample.group, vote), i)
    home: dict[int, int] = {}
    left = list(first.values())
    for _ in range(MAX_CLASSES):
        heads: dict[int, int] = {}
        for i in left:
            heads.setdefault(samples[i].group, i)
        left = [i for i in left if i not in heads.values()]
        asked = [i for i in left if correct[i] == correct[heads[samples[i].group]]]
        if not asked:
            break
        rows = [replace(samples[i], row={**samples[i].row, GOLD_COLUMN: votes[heads[samples[i].group]]}) for i in asked]
        (results,) = scorer.results(rows, only=[scorer.correctness])
        for i, result in zip(asked, results, strict=True):
            if (get_score(result) or 0.0) >= scorer.scoring.correct_at:
                home[i] = heads[samples[i].group]
        left = [i for i in left if i not in home]
    found = {key: votes[home.get(i, i)] for key, i in first.items()}
    return [found[sample.group, vote] if vote else vote for sample, vote in zip(samples, votes, strict=True)]
