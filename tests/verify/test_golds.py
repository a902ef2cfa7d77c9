"""Which gold answers can be compared, on hand-written cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import pytest

from posttrain.verify.golds import accepts_type, explain_unusable, gold_text, is_no_answer, is_sentence
from posttrain.verify.math import grade


class Call(TypedDict):
    name: str


@pytest.mark.parametrize(
    "answer",
    ["7", 7, 0, 0.5, False, "x is even", "no solution", r"\\text{none}", "nano", "see", "n", "A", ["", "7"], {"a": 1},
     "0", "proofs", "-1", "1/2", "Figure skating", "not prime", "answer"],
)  # fmt: skip
def test_usable_golds(answer: Any) -> None:
    assert explain_unusable(answer) == ""


@pytest.mark.parametrize(
    "answer",
    [None, "", " \n", float("nan"), "NaN", "none", "NULL", "N/A", "-", "???", "...", [], [None, ""], (), {},
     "see figure", "See Figure 3.", "see the attached diagram", "Please refer to the table below",
     "refer to the solution", "as shown in the graph", "Answers will vary.", "no answer", "not provided", "proof",
     "see above"],
)  # fmt: skip
def test_unusable_golds(answer: Any) -> None:
    assert explain_unusable(answer) != ""
    assert gold_text(answer) is None
    assert grade(r"\boxed{7}", answer)["reward"] is None


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("The proof is by induction on n.", True),
        ("There are infinitely many primes.", True),
        ("n is prime because it has no divisor below 5", True),
        ("all real numbers", False),
        ("the battle of hastings", False),
        ("two red and three blue marbles", False),
        (r"\text{there is no such number at all}", False),
        (r"x is $a + b$", False),
        ("5", False),
    ],
)
def test_prose_golds(text: str, prose: bool) -> None:
    assert is_sentence(text) is prose
    assert (grade(rf"\boxed{{{text}}}", text)["reward"] is None) is prose


@pytest.mark.parametrize("answer", [["5"], ("5",), {"value": "5"}, '{"value": "5"}', "{'value': '5'}", '["5", "6"]'])
def test_containers_are_not_math_answers(answer: Any) -> None:
    assert grade(rf"\boxed{{{answer}}}", answer)["reward"] is None
    assert grade(r"\boxed{5}", answer)["reward"] is None


@pytest.mark.parametrize("text", ["{1, 2}", r"\{x: x > 0\}", "[1, 2]", "(1, 2)", '[0, "a")'])
def test_sets_and_intervals_are_answers(text: str) -> None:
    assert not is_no_answer(text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('["18"]', "18"),
        ("So 3 * 6 = 18. The answer is 18.", "18"),
        ("Answer: 18", "18"),
        (
            "The answer is that no such number exists in this case",
            "The answer is that no such number exists in this case",
        ),
        (18, "18"),
        ("[18]", "[18]"),
    ],
)
def test_gold_text_of_other_formats(answer: Any, expected: str) -> None:
    assert gold_text(answer) == expected


@pytest.mark.parametrize(
    ("annotation", "lists", "dicts"),
    [
        (None, True, True),
        (Any, True, True),
        (str, False, False),
        (str | None, False, False),
        (str | float | None, False, False),
        (Sequence[str] | str, True, False),
        (list[str], True, False),
        (Mapping[str, Any] | str | None, False, True),
        (dict[str, int], False, True),
        (Call, False, True),
        (list[Call] | Call, True, True),
    ],
)
def test_admits(annotation: Any, lists: bool, dicts: bool) -> None:
    assert (accepts_type(annotation, list), accepts_type(annotation, dict)) == (lists, dicts)


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("12 (inches of snow)", "12", 1.0),
        ("12 (inches of snow)", "12\\text{ inches}", 1.0),
        ("12 (inches)", "1\\text{ foot}", 1.0),
        ("12 (inches)", "12\\text{ feet}", 0.0),
        ("3(x)", "3x", 1.0),
        ("3(x)", "3", 0.0),
        ("3 (x)", "3", 0.0),
        ("2(pi)", "2", 0.0),
        ("2 (log x)", "2", 0.0),
        ("-1 (mod p)", "-1", 0.0),
        ("5 (times)", "5", 1.0),
        ("9 (quarters)", "9", 1.0),
        ("9 (quarters)", "8", 0.0),
        ("9 (apples)", "9", 1.0),
        ("9 (years old)", "9\\text{ years}", 1.0),
        ("385 (square feet)", "385", 1.0),
        ("396 (degrees)", "396", 1.0),
        ("19 (pairs of shoes)", "19", 1.0),
        ("67.9 (scores)", "67.9", 1.0),
        ("5 (thousand)", "5", 0.0),
        ("36 (sq. inches)", "36", 1.0),
        ("15 (tee-shirts)", "15", 1.0),
        ("1/2 (cups of flour)", "0.5", 1.0),
        ("Solution is: $k=4$.", "4", 1.0),
        ("Solution is: $k=4$.", "k=4", 1.0),
        ("Solution is: $k=4$.", "5", 0.0),
        ("The solution is $x=2$", "2", 1.0),
        ("Solution is: $i \\sqrt{3}+1,1-i \\sqrt{3},-2$", "-2, 1+i\\sqrt3, 1-i\\sqrt3", 1.0),
        ("$n \\pi \\pm \\pi / 6$, any integer $n$", "n\\pi\\pm\\frac{\\pi}{6}", 1.0),
    ],
)
def test_golds_as_data_sets_write_them(gold: str, answer: str, reward: float) -> None:
    """ASDiv has units in brackets: `(quarters)` is counted, `(thousand)` a number; College Math has sentences."""
    assert grade(f"So \\boxed{{{answer}}}", gold)["reward"] == reward


@pytest.mark.parametrize("text", ["The solution is below", "Solution is left to the reader", "The solution is a proof"])
def test_a_sentence_about_the_solution_stays(text: str) -> None:
    assert gold_text(text) == text
