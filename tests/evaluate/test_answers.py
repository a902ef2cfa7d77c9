"""The answer that a completion votes for."""

from __future__ import annotations

import pytest

from posttrain.evaluate.votes import extract_voted_answer, find_vote_extractors
from posttrain.recipe.reward_sections import Reward
from posttrain.verify.load import load_reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>5</think><answer> 7 </answer>", "7"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("work\n#### 42", "42"),
        ("The answer is 12.", "12"),
        ("first\n\nblue  \n", "blue"),
        (r"<think>\boxed{1}</think> two", "two"),
        ("", None),
        ("<think>all</think>\n ", None),
    ],
)
def test_voted_answer(completion: str, answer: str | None) -> None:
    assert extract_voted_answer(completion, finished=True) == answer


def test_truncated_completion_votes_only_with_an_answer_mark() -> None:
    assert extract_voted_answer("so far so", finished=False) is None
    assert extract_voted_answer("<answer>3</answer> and", finished=False) == "3"


def test_vote_uses_the_extraction_of_the_reward() -> None:
    text = "first 3, then 4"
    assert extract_voted_answer(text, finished=True, order=["boxed"]) is None
    assert extract_voted_answer(text, finished=True, order=["boxed", "last_number"]) == "4"
    assert extract_voted_answer(text, finished=False, order=["boxed", "last_number"]) is None


def test_vote_order_comes_from_the_correctness_reward() -> None:
    """Its `extract` as set by the recipe, else its default; a reward without that argument has none."""
    sections = [Reward(use="format.structure"), Reward(use="math.accuracy", correct=True)]
    set_ = [sections[0], sections[1].model_copy(update={"params": {"extract": ["hash"]}})]
    for given, order in ((sections, ("boxed",)), (set_, ["hash"]), (sections[:1], None)):
        assert find_vote_extractors(given, [load_reward(section, None) for section in given]) == order
