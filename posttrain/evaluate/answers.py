"""What a completion votes for: the answer that the correctness reward would look at."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from posttrain.recipe.reward_sections import Reward
from posttrain.verify.extract import Extractor, after_think, extract
from posttrain.verify.load import LoadedReward

# From the most explicit mark to the least; what is not among them says nothing about where an answer ends.
MARKS: tuple[Extractor, ...] = ("answer_tag", "boxed", "hash", "anchor")


def voted_answer(completion: str, *, finished: bool, order: Sequence[Extractor] | None = None) -> str | None:
    r"""The answer after the thought, by the first extractor of `order` that finds one; None = no vote.

    order None: a marked answer (`<answer>`, `\boxed`, `####`, `answer is`), else the last line that is not blank. A
    completion that was cut off (`finished` False) votes only with a marked answer: its last number or line is no end.
    """
    text = after_think(completion)
    looked_for = [name for name in (MARKS if order is None else order) if finished or name in MARKS]
    found = extract(text, looked_for)
    if found is None and order is None and finished:
        found = next((line for line in reversed(text.splitlines()) if line.strip()), None)
    return found.strip() or None if found is not None else None


def vote_order(sections: Sequence[Reward], rewards: Sequence[LoadedReward]) -> Sequence[Extractor] | None:
    """Where the correctness reward looks for the answer: its `extract`, set or default; None without one."""
    marked = next((i for i, section in enumerate(sections) if section.correct), 0)
    reward = rewards[marked]
    argument = inspect.signature(reward.function).parameters.get("extract")
    if argument is None:
        return None
    order = reward.params.get("extract", argument.default)
    return order if isinstance(order, list | tuple) else None
