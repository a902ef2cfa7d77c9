"""Votes of an evaluation's samples: the answer of a completion, and answers that the verifier considers equal.

`match_votes` merges votes such as `0.5` and `1/2`. It calls the correctness reward itself, in its worker processes and
under its limits, with one answer as the gold of the other's completion. This works only if the reward has an extraction
order (`extract`) and reads the column `answer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

from posttrain.recipe.reward_sections import Reward
from posttrain.verify.extract import Extractor, after_think, extract
from posttrain.verify.load import LoadedReward
from posttrain.verify.score import Sample, Scorer, get_score

# Extractors of explicitly marked answers, most explicit first; the others do not show where an answer ends.
EXPLICIT_MARKS: tuple[Extractor, ...] = ("answer_tag", "boxed", "hash", "anchor")
GOLD_COLUMN = "answer"
MAX_CLASSES = 8  # answers of a problem that others are compared with; further answers vote by their text


def extract_voted_answer(completion: str, *, finished: bool, order: Sequence[Extractor] | None = None) -> str | None:
    r"""Return the answer after the thought, from the first extractor of `order` that finds one; None = no vote.

    order None: a marked answer (`<answer>`, `\boxed`, `####`, `answer is`), else the last line that is not blank. A
    truncated completion (`finished` False) votes only with a marked answer, because its last number or line is not a
    final answer.
    """
    text = after_think(completion)
    extractors = [name for name in (EXPLICIT_MARKS if order is None else order) if finished or name in EXPLICIT_MARKS]
    found = extract(text, extractors)
    if found is None and order is None and finished:
        found = next((line for line in reversed(text.splitlines()) if line.strip()), None)
    return found.strip() or None if found is not None else None


def find_vote_extractors(sections: Sequence[Reward], rewards: Sequence[LoadedReward]) -> Sequence[Extractor] | None:
    """Return the extractors of the correctness reward: its `extract` parameter, set or default; None if it has none."""
    marked = next((i for i, section in enumerate(sections) if section.correct), 0)
    reward = rewards[marked]
    argument = inspect.signature(reward.function).parameters.get("extract")
    if argument is None:
        return None
    order = reward.params.get("extract", argument.default)
    return order if isinstance(order, list | tuple) else None


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
    matched = {key: votes[merged_into.get(i, i)] for key, i in first.items()}
    return [matched[sample.group, vote] if vote else vote for sample, vote in zip(samples, votes, strict=True)]
