"""Rewards on thoughts, answers and reflections: edge cases beyond the vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posttrain.verify import reasoning
from posttrain.verify.reasoning import (
    conclusion,
    critique,
    format_and_accuracy,
    letter_of,
    reflection,
    shuffled_consistency,
    think_answer_consistency,
    verdict,
)


def test_conclusion_is_the_last_box_or_else_the_answer() -> None:
    assert conclusion(r"\boxed{3}, no: \boxed{4}. The answer is 5") == "4"
    assert conclusion("The answer is 5, so the Answer is: 6; done") == "6"
    assert conclusion("the answer is") is None
    assert conclusion("nothing") is None


@pytest.mark.parametrize(
    ("completion", "reward", "consistent"),
    [
        (r"<think>\boxed{1/2}</think><answer>0.5</answer>", 1.0, True),
        ("<think>the answer is 4</think>", 0.0, None),
        ("<answer>4</answer>", 1.0, None),
        ("the answer is 5</think><answer>4</answer>", 0.5, False),
        ("<think>the answer is 4 <answer>4</answer></think>5", 0.0, None),
    ],
)
def test_think_answer_consistency(completion: str, reward: float, consistent: bool | None) -> None:
    gold = "1/2" if "1/2" in completion else "4"
    found = think_answer_consistency(completion, gold)
    assert (found["reward"], found["consistent"]) == (reward, consistent)


def test_consistency_never_scores_more_than_accuracy() -> None:
    for answer in ("4", "5"):
        for thought in ("the answer is 4", "the answer is 5", ""):
            found = think_answer_consistency(f"<think>{thought}</think><answer>{answer}</answer>", "4")
            assert found["reward"] <= float(answer == "4")


def test_row_without_gold_has_no_score() -> None:
    for answer in (None, "", " "):
        assert think_answer_consistency("<answer>4</answer>", answer)["reward"] is None
        assert format_and_accuracy("<answer>4</answer>", answer)["reward"] is None
        assert reflection("<answer>4</answer>", answer, 1, 1)["reward"] is None


def test_model_that_always_answers_b_gets_at_most_the_second_value() -> None:
    """Any shuffle moves the gold option, so the second answer B is a different option."""
    for permutation in ([1, 0, 2, 3], [2, 0, 1, 3], [3, 2, 1, 0]):
        assert shuffled_consistency("B", "B", permutation, "B")["reward"] == 0.5


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("a", "(b).", 1.0), ("A", None, 0.5), (None, "B", 0.0), ("E", "E", 0.0), ("A", "Z", 0.5), (None, None, 0.0)],
)
def test_shuffled_choices(first: Any, second: Any, expected: float) -> None:
    found = shuffled_consistency(first, second, [1, 0, 2], "A")
    assert found["reward"] == expected
    assert found["consistent"] is (expected == 1.0)


def test_option_letters() -> None:
    assert [letter_of(t) for t in ("b", "(C)", "D.", "Oslo", "", None)] == ["B", "C", "D", None, None, None]


def test_the_length_part_is_largest_at_twice_the_first_answer() -> None:
    """exp(-((L - 40) / 10)^2): exp(-1/4) at 45."""
    twice = "<answer>1</answer><answer>1</answer>"
    at = {total: reflection(twice, "1", total, 20)["length"] for total in (35, 40, 45)}
    assert at[40] == 0.1
    assert at[45] == at[35] == pytest.approx(0.1 * math.exp(-0.25))
    assert reflection(twice, "1", 40, 0)["length"] == 0.0
    assert reflection("<answer>1</answer>", "1", 40, 20)["length"] == 0.0


def test_missing_reflection_costs_only_the_format_reward() -> None:
    text = "<think>a</think><answer>1</answer><think>b</think><answer>2</answer>"
    found = reflection(text, "2", 0, 0)
    assert (found["format"], found["accuracy"]) == (0.0, 1.0)
    assert reflection("<answer>3</answer>", "2", 0, 0)["accuracy"] == 0.0
    assert reflection("<answer>3</answer><answer>3</answer>", "2", 0, 0, still_wrong=-1)["accuracy"] == -1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Correctness of the final answer: Correct", True),
        ("**Correctness of the final answer: Wrong**", False),
        ("**correctness of the final answer:** **correct**", True),
        ("Correctness of the final answer: Correct ... Correctness of the final answer: wrong", False),
        ("Correctness of the final answer: incorrect", None),
        ("Correct", None),
    ],
)
def test_verdicts_are_read(text: str, said: bool | None) -> None:
    assert verdict(text) is said


def test_right_verdict_beats_a_wrong_one_in_stage_2() -> None:
    right, wrong = (f"Correctness of the final answer: {word}" for word in ("Correct", "Wrong"))
    worst = min(critique(right, 1, refined)["reward"] for refined in (0, 1, None))
    assert worst == pytest.approx(0.2)
    assert critique(wrong, 1, 1)["reward"] == -1.0
    values = [0.2, -0.5, 1.0, 0.0]
    assert critique(right, 1, 0, refine_values=values)["reward"] == pytest.approx(-0.3)
    assert critique(wrong, 0, 1, refine_values=values)["reward"] == pytest.approx(1.2)
    with pytest.raises(ValueError, match="stage"):
        critique(right, 1, stage=3)  # type: ignore[arg-type]


def test_two_part_reward_is_0_1_or_2() -> None:
    texts = ["", "<answer>4</answer>", "<think>a</think><answer>4</answer>", "<think>a</think><answer>5</answer>"]
    assert [reasoning.format_and_accuracy(t, "4")["reward"] for t in texts] == [0.0, 1.0, 2.0, 1.0]
    assert format_and_accuracy("<think> </think><answer>4</answer>", "4")["format"] == 0.0


def test_minus_sign_counts_for_numeric_answers() -> None:
    assert reasoning.same_maths("-5", ["5"]) is False
    assert reasoning.same_maths("5.0", ["5"]) is True
    assert reasoning.same_maths("the Oslo!", ["Oslo"]) is True


def test_verdict_inside_the_thought_is_ignored() -> None:
    text = "Correctness of the final answer: Correct"
    assert reasoning.verdict(f"<think>{text}</think>") is None
    assert reasoning.verdict(f"<think>hm</think>{text}") is True


DIFFERENT = [
    *(("-x", "x"), ("x", "-x"), ("y=x", "y=-x"), (r"\pi", r"-\pi"), ("x+y", "x-y"), ("a/b", "ab"), ("C++", "C")),
    *(("f'", "f"), ("xy", "-xy"), ("Oslo", "-Oslo"), ("Oslo", "Rome"), ("a,b", "a,-b")),
]
EQUAL = [
    *(("-x", "-x"), ("x+y", "y+x"), ("the Oslo!", "Oslo"), ("B", "B."), ("C++", "C++"), ("No", "no")),
    *(("New York City", "the new York city."), ("well-known", "Well-known"), ("1/2", "0.5")),
]


@pytest.mark.parametrize(("gold", "answer", "same"), [*((*p, False) for p in DIFFERENT), *((*p, True) for p in EQUAL)])
def test_operators_count_in_answers_without_digits(gold: str, answer: str, same: bool) -> None:
    assert reasoning.same_maths(answer, [gold]) is same


def test_answer_inside_the_thought_is_ignored() -> None:
    text = "<think><answer>6</answer></think><answer>5</answer>"
    assert reflection(text, "5", 0, 0)["accuracy"] == 0.5
    assert reasoning.first_part(text) == text
    twice = "<think>a</think><answer>1</answer> <think>b</think><answer>2</answer>"
    assert reasoning.first_part(twice).endswith("1</answer>")
    assert reasoning.first_part("<answer>6</answer></think>") == ""


@pytest.mark.parametrize(
    "last", [r"\boxed{}", r"\boxed{ . }", r"\fbox{\ }", "The answer is", "the answer is: ...", "answer is ;"]
)
def test_empty_conclusion_does_not_hide_an_earlier_one(last: str) -> None:
    assert conclusion(f"So the answer is 6. {last}") == "6"
    assert conclusion(rf"\boxed{{6}} {last}") == "6"
    assert think_answer_consistency(f"<think>the answer is 6. {last}</think><answer>5</answer>", "5")["reward"] == 0.5
