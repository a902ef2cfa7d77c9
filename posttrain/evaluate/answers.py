"""Extraction of the answer that a completion votes for, with the extractors of the correctness reward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from posttrain.recipe.reward_sections import Reward
from posttrain.verify.extract import Extractor, after_think, extract
from posttrain.verify.load import LoadedReward

# Extractors of explicitly marked answers, most explicit first; the others do not show where an answer ends.
EXPLICIT_MARKS: tuple[Extractor, ...] = ("answer_tag", "boxed", "hash", "anchor")


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
