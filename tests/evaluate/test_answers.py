"""Which answer a completion votes for."""

from __future__ import annotations

import pytest

from posttrain.evaluate.answers import voted_answer


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
    assert voted_answer(completion, finished=True) == answer


def test_a_completion_that_was_cut_votes_only_with_a_mark() -> None:
    assert voted_answer("so far so", finished=False) is None
    assert voted_answer("<answer>3</answer> and", finished=False) == "3"
