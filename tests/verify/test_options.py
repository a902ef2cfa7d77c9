"""Multiple choice: a chosen option is right in any notation, and naming two options is wrong."""

from __future__ import annotations

import pytest

from posttrain.verify.math import equal
from posttrain.verify.options import find_options, option_letter, split_label

CHOSEN = ["B", "(B)", "B.", "b", "(b)", r"\text{B}", r"\text{(B)}", r"\mathbf{B}", "**B**", "$B$", "B)", "Option B"]
CHOSEN += [
    "option (B)",
    "The correct answer is B",
    "(B) 12",
    "B. 12",
    "B) Oslo",
    r"\textbf{(B)}\ 12",
    r"\textbf{(B) }12",
]
CHOSEN += ["(B) Both (A) and (C)", "B. neither A nor C", "(B) Vitamin C", "(B) P(A)", "(B) B", "B: x = 5"]

HEDGES = [
    "(A) B",
    "(B) A",
    "(A) (B)",
    "(A)(B)",
    "A. B",
    "B. A",
    "A) B",
    "A: B",
    "A or B",
    "A, B",
    "A/B",
    "A and B",
    "B A",
]
HEDGES += ["(A) or (B)", "(B), (A)", "(B) or A", r"\text{(A)}\text{(B)}", r"\text{(A)}\ \text{(B)}", r"A\text{ or }B"]
HEDGES += [
    r"\textbf{(A)}\ B",
    "(A) 5 (B) 6",
    "B. 6 A. 5",
    "(B) Oslo or (A) Rome",
    "$A$ or $B$",
    r"\textbf{(B)} or \textbf{(C)}",
]


@pytest.mark.parametrize("candidate", CHOSEN)
@pytest.mark.parametrize("gold", ["B", "(B)", r"\text{(B)}"])
def test_single_option(gold: str, candidate: str) -> None:
    assert equal(gold, candidate) is True
    assert equal(gold.replace("B", "C"), candidate) is False


@pytest.mark.parametrize("candidate", HEDGES)
@pytest.mark.parametrize("gold", ["A", "B", "(A)", r"\text{(B)}"])
def test_hedge_is_wrong_for_each_of_its_options(gold: str, candidate: str) -> None:
    assert len(find_options(candidate)) == 2
    assert equal(gold, candidate) is False


@pytest.mark.parametrize("candidate", ["A, C", "C, A", "(A) and (C)", r"\text{A, C}", "(A), (C)"])
def test_gold_of_several_options(candidate: str) -> None:
    assert equal("A, C", candidate) is True
    assert equal("A, D", candidate) is False
    assert equal("A", candidate) is False


@pytest.mark.parametrize(
    ("gold", "candidate", "expected"),
    [
        ("12", "(B) 12", True),
        ("12", "(B) 13", False),
        ("12", "(A) 12 (B) 13", False),
        ("Oslo", "B) Oslo", True),
        ("(B) 12", "B", True),
        ("(B) 12", "12", True),
        ("(A,B)", "(B,A)", False),  # a point or an interval is not a choice of options
        ("A+B", "B+A", True),
        ("AB", "BA", False),
        ("E", "2E", False),
        ("i", r"\sqrt{-1}", True),
    ],
)
def test_answer_without_options_is_compared_as_usual(gold: str, candidate: str, expected: bool) -> None:
    assert equal(gold, candidate) is expected


@pytest.mark.parametrize("text", ["", "x", "AB", "A = 5", "f(A)", "A + B", "(A, B)", "K", "12", "A-B", "[A, B]"])
def test_text_that_names_no_option(text: str) -> None:
    assert find_options(text) == [] and option_letter(text) is None and split_label(text) is None


QUOTIENTS = [
    ("a/b", "b/a"),
    ("a/c", "c/a"),
    ("b/a", "a/b"),
    ("A/B", "B/A"),
    ("a/e", "e/a"),
    ("f/a", "a/f"),
    ("a / b", "b / a"),
    ("$a/d$", "$d/a$"),
    ("a/b/c", "c/b/a"),
    ("a|b", "b|a"),
    ("A|B", "B|A"),
    ("a/b", "AB"),
    ("a/b", "a,b"),
    ("a/b", "b, a"),
    ("a/b", "a and b"),
    ("a/b", "(A)(B)"),
    ("a/b", "(A), (B)"),
    ("A/B", "A or B"),
    ("AB", "B/A"),
    ("AC", "a/c"),
    ("ABD", "A/B/D"),
    ("ab", "a/b"),
    ("C", "C/D"),
    ("(C) 5", "C/D"),
]


@pytest.mark.parametrize(("gold", "candidate"), QUOTIENTS)
def test_letters_around_a_slash_are_a_quotient(gold: str, candidate: str) -> None:
    assert equal(gold, candidate) is False
    assert equal(gold, gold + " ") is True


@pytest.mark.parametrize(
    ("gold", "candidate", "expected"),
    [
        ("a/c", r"\frac{a}{c}", True),
        (r"\frac{a}{c}", "a/c", True),
        ("a/c", "ac^{-1}", True),
        ("a/b/c", r"\frac{a}{bc}", True),
        ("A, C", "A/C", True),
        ("A and C", "C / A", True),
        ("A, C", "A/B", False),
        ("(A), (C)", "(A)/(C)", True),
    ],
)
def test_slash_separates_options_only_in_a_list(gold: str, candidate: str, expected: bool) -> None:
    assert equal(gold, candidate) is expected
