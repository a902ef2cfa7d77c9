"""Merges votes for answers that the verifier considers equal, such as `0.5` and `1/2`.

Calls the correctness reward itself, in its worker processes and under its limits, with one answer as the gold of the
other's completion. This works only if the reward has an extraction order (`extract`) and reads the column `answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.verify.score import Sample, Scorer, get_score

GOLD_COLUMN = "answer"
MAX_CLASSES = 8  # answers of a problem that others are compared with; further answers vote by their text


def match_votes(
    scorer: Scorer, samples: Sequence[Sample], answers: Sequence[str | None], correct: Sequence[bool | None]
) -> list[str | None]:
    """Return the vote of each sample: the first answer of its problem that is equal to its own, by text or verifier.

    Answers are compared with the first of each class, never all with all, and only if both are right or both wrong. A
    comparison that fails or times out merges nothing.
    """
    votes = [answer.strip() if answer else answer for answer in answers]
    reward = scorer.rewards[scorer.correctness]
    if GOLD_COLUMN not in reward.columns:
        return votes
    first: dict[tuple[int, str], int] = {}  # problem and text -> its first sample
    for i, (sample, vote) in enumerate(zip(samples, votes, strict=True)):
        if vote:
            first.setdefault((sample.group, vote), i)
    merged_into: dict[int, int] = {}
    pending = list(first.values())
    for _ in range(MAX_CLASSES):
        heads: dict[int, int] = {}
        for i in pending:
            heads.setdefault(samples[i].group, i)
        pending = [i for i in pending if i not in heads.values()]
        compared = [i for i in pending if correct[i] == correct[heads[samples[i].group]]]
        if not compared:
            break
        rows = [
            replace(samples[i], row={**samples[i].row, GOLD_COLUMN: votes[heads[samples[i].group]]}) for i in compared
        ]
        (results,) = scorer.results(rows, only=[scorer.correctness])
        for i, result in zip(compared, results, strict=True):
            if (get_score(result) or 0.0) >= scorer.scoring.correct_at:
                merged_into[i] = heads[samples[i].group]
        pending = [i for i in pending if i not in merged_into]
    found = {key: votes[merged_into.get(i, i)] for key, i in first.items()}
    return [found[sample.group, vote] if vote else vote for sample, vote in zip(samples, votes, strict=True)]
