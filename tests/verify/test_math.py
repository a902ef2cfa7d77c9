"""Math equivalence: judged answer pairs by kind, and wrong answers derived from right ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from posttrain.verify import math
from posttrain.verify.math import equal, gold_text, grade


@pytest.mark.parametrize(
    ("gold", "candidate", "expected"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.333", False),
        ("3.14", r"\pi", False),
        (r"3\pi", "9.42", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("1,2", "2,1", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1)", "(0,1)", False),
        ("5", "x = 5", True),
        ("50%", "0.5", True),
        ("50", r"50\%", True),
        ("5", r"5\text{ cm}", True),
        ("90", r"90^\circ", True),
        ("5", r"\$5", True),
        ("1000", "1,000", True),
        (r"\text{(C)}", "C", True),
        (r"\text{Paris}", r"\text{paris}", True),
        ("1000", "1e3", True),
        ("12", "12.", True),
        ("x^2+1", "1+x^2", True),
        ("7", "8", False),
        ("90", "90°", True),
        (r"\sqrt{2}", "√2", True),
        (r"2\sqrt{3}", "2√3", True),
        (r"\sqrt{2}", "√3", False),
        (r"(-\infty, 2)", "(-∞, 2)", True),
        ("x^2", "x²", True),
        ("100", "10²", True),
        ("0.5", "½", True),
        (r"\varnothing", r"\emptyset", True),
    ],
)
def test_judged_pairs(gold: str, candidate: str, expected: bool) -> None:
    assert equal(gold, candidate) is expected


def test_unparsable_gold_gives_no_judgement() -> None:
    assert equal("}", "5") is None
    assert grade(r"\boxed{5}", "}")["reward"] is None
    assert grade("no box", "}")["reward"] is None


def test_decimals_param_sets_the_rounding() -> None:
    assert equal("1/3", "0.333", decimals=3) is True
    assert equal("1/3", "0.33", decimals=3) is False


def test_integer_shortcut_agrees_with_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plain integers are compared as text; parsing them must give the same judgement for every such pair."""
    draw = random.Random(0)
    numbers = [0, 1, -1, 10, 999_999_999_999_999] + [draw.randint(-(10**15) + 1, 10**15 - 1) for _ in range(10)]
    pairs = [(str(a), str(b)) for a in numbers for b in (a, a + 1, -a) if abs(b) < 10**15]
    short = [equal(a, b) for a, b in pairs]
    assert {True, False} == set(short)
    monkeypatch.setattr(math, "_INTEGER", math.re.compile("(?!)"))
    assert [equal(a, b) for a, b in pairs] == short


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{7} #### 8", "7"),
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 1 #### 2 ", "2"),
        (" 5 ", "5"),
        ("", None),
        ("  ", None),
        (r"\boxed{}", None),
        ("text ####", None),
        (r"$\boxed{1}$ and, by the second equation, $\boxed{-2}$", "1, -2"),
        (r"\boxed{5}. Check: it is \boxed{5}.", "5"),
        ("6 * 7 = 42\n#### 42 (forty-two)", "42"),
        (r"So there are $\boxed 2$ of them.", "2"),
        ("6 * 7 = 42\n**#### 42**\nDone.", "42"),
    ],
)
def test_gold_text(answer: str, expected: str | None) -> None:
    assert gold_text(answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "params", "reward", "extracted"),
    [
        (r"\boxed{5}", "5", {}, 1.0, "5"),
        (r"\boxed{4} wait \boxed{5}", "5", {}, 1.0, "5"),
        ("", "5", {}, 0.0, None),
        (r"\boxed{}", "5", {}, 0.0, ""),
        (r"\boxed{  }", "5", {}, 0.0, "  "),
        (r"\boxed{5", "5", {}, 0.0, None),
        (r"<think>\boxed{5}</think>", "5", {}, 0.0, None),
        (r"<think>\boxed{4}</think>\boxed{5}", "5", {}, 1.0, "5"),
        (r"a</think>b</think>\boxed{5}", "5", {}, 1.0, "5"),
        (r"\boxed{5}", "5", {"require_think": True}, 0.0, None),
        (r"x</think>\boxed{5}", "5", {"require_think": True}, 1.0, "5"),
        (r"x[/T]\boxed{5}", "5", {"require_think": True, "think_delimiter": "[/T]"}, 1.0, "5"),
        (r"\boxed{4}[/T] five", "4", {"think_delimiter": "[/T]"}, 0.0, None),
        ("<answer>5</answer>", "5", {}, 0.0, None),
        ("<answer>5</answer>", "5", {"extract": ("answer_tag",)}, 1.0, "5"),
        (r"<answer>so \boxed{5}</answer>", "5", {"extract": ("answer_tag",)}, 1.0, "5"),
        ("#### 5", "5", {"extract": ("boxed", "hash")}, 1.0, "5"),
        ("The answer is **12.**", "12", {"extract": ("anchor",)}, 1.0, "12"),
        (r"The answer is $\boxed{5}$.", "5", {"extract": ("anchor",)}, 1.0, r"\boxed{5}"),
        ("5 or 6", "6", {"extract": ("last_number",)}, 1.0, "6"),
        (r"\boxed{} #### 5", "5", {"extract": ("boxed", "hash")}, 0.0, ""),  # the box is found first
        (r"\boxed{5}", 5, {}, 1.0, "5"),
        (r"\boxed{5}", "", {}, None, None),
        (r"\boxed{5}", None, {}, None, None),
        (r"\boxed{0.333}", "1/3", {"decimals": 3}, 1.0, "0.333"),
        (r"\boxed{\frac{}", "5", {}, 0.0, None),
        (r"\boxed{答え}", "5", {}, 0.0, "答え"),
        (r"\boxed{4} or \boxed{5}", "5", {}, 0.0, "4, 5"),  # one answer of two values
        (r"\boxed{1, -2}", r"\boxed{1} and \boxed{-2}", {}, 1.0, "1, -2"),
        (r"\boxed{-2} or \boxed{1}", r"\boxed{1} and \boxed{-2}", {}, 1.0, "-2, 1"),
        (r"$x=\boxed{1}$ or $x=\boxed{-2}$", "1, -2", {}, 1.0, "1, -2"),
        (r"One is \boxed{1}, the other \boxed{-2}.", r"\boxed{1} and \boxed{-2}", {}, 1.0, "1, -2"),
        (r"\boxed{3}: no. One is \boxed{1}, the other \boxed{-2}.", r"\boxed{1}, \boxed{-2}", {}, 1.0, "1, -2"),
        (r"\boxed{3}, \boxed{1} and \boxed{-2}", r"\boxed{1} and \boxed{-2}", {}, 0.0, "3, 1, -2"),
        (r"\boxed{-2}", r"\boxed{1} and \boxed{-2}", {}, 0.0, "-2"),
        (r"\boxed{A} or \boxed{B}", "B", {}, 0.0, "A, B"),
        ("#### 18/day", "18", {"extract": ("hash",)}, 1.0, "18/day"),
        ("#### $18 / hour", "18", {"extract": ("hash",)}, 1.0, "18 / hour"),
        ("#### 18/sqrt(2)", "18", {"extract": ("hash",)}, 0.0, "18/sqrt(2)"),
        ("**Final Answer:** 12 eggs.", "12", {"extract": ("anchor",)}, 1.0, "12 eggs"),
        ("Answer: (B) 12", "B", {"extract": ("anchor",)}, 1.0, "(B) 12"),
        ("Answer: 12 or 13", "12", {"extract": ("anchor",)}, 0.0, "12 or 13"),
    ],
)
def test_grade(
    completion: str, answer: Any, params: dict[str, Any], reward: float | None, extracted: str | None
) -> None:
    assert grade(completion, answer, **params) == {"reward": reward, "extracted": extracted}


@pytest.mark.parametrize(
    "gold", ["1/2", r"\frac{3}{4}", r"\sqrt{2}", "(1, 2)", r"\{1, 2\}", "x = 5", "50%", r"\text{no}"]
)
def test_gold_equals_itself(gold: str) -> None:
    assert equal(gold, gold) is True


def test_no_signal_handler_is_installed() -> None:
    """SIGALRM limits fail outside the main thread; work is bounded by size instead."""
    import threading

    found: list[bool | None] = []
    thread = threading.Thread(target=lambda: found.append(equal("1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [True]


CASES = json.loads(Path(__file__).with_name("math_verify_cases.json").read_text(encoding="utf-8"))
# Cases in which posttrain deviates from math-verify's tests.
APART = {
    # In a box these are lists.
    ("1000.99", "the number is not 10 which is 1,000.99€"),
    ("1000.99", "so the number is 10 which is 1,000.99m²"),
    ("1000.99", "not it's not 10 it's 1,000.99m²"),
    # math-verify's tests call 1/2 = 10/9, 7 = 11, 11 = 1/3, 6 = 2 and 1/3 about 1.3.
    ("1/3", r"x=1/3\approx1.3"),
    ("10/9", r"\frac{1}{2} \$ = \frac{10}{9}"),
    ("x = 11", "x = 5+5+1 = 7 =11"),
    ("x = 1/3", r"x = 5+5+1 = 1/3 \approx 11"),
    ("z = 1 + 1 = 2", "z = 3+3 = 2"),
    # A gold with a comma between its digits is a list; 0.111 is neither 0 nor 111.
    ("1,22", "1.22"),
    ("0,111", "0.111"),
    # Chains that claim 1 = 0, and unevaluated matrix products.
    (r"1 = \zzz = x = 0", "0"),
    (
        r"\begin{pmatrix}6 & 8 \\ 10 & 12\end{pmatrix}",
        r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} + \begin{pmatrix}5 & 6 \\ 7 & 8\end{pmatrix}",
    ),
    (
        r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}",
        r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix} \begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}",
    ),
    # An interval and the equivalent inequality, in either order; and 1 - 1/e is not 1 + 1/e.
    (r"x \in [-2,7]", r"-2 \\le x \\le 7"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
}


@pytest.mark.parametrize("name", CASES)
def test_agreement_with_math_verify_on_its_own_test_strings(name: str) -> None:
    """Check (gold, answer, equal) of math-verify 0.9.0's tests (Apache-2.0) if each text holds one answer."""
    wrong = {(gold, answer) for gold, answer, expected in CASES[name] if equal(gold, answer) is not bool(expected)}
    assert wrong == {(gold, answer) for gold, answer, _ in CASES[name] if (gold, answer) in APART}


ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_as_people_and_models_write_them(kind: str) -> None:
    """Check (gold, answer, equal) by kind: a mathematician's verdict, on the question whose answer is the gold."""
    assert [row for row in ANSWERS[kind] if equal(*row[:2]) is not bool(row[2])] == []


def test_table_of_answers_is_complete() -> None:
    assert sum(map(len, ANSWERS.values())) > 3000
    assert {expected for rows in ANSWERS.values() for _, _, expected in rows} == {0, 1}


def test_table_of_math_verify_is_complete() -> None:
    assert sum(map(len, CASES.values())) == 197
    assert {expected for rows in CASES.values() for _, _, expected in rows} == {0, 1}


def test_cache_key_includes_the_rounding() -> None:
    assert [equal("1/3", "0.333", decimals=d) for d in (3, 6, 3)] == [True, False, True]


def test_long_answer_is_compared_but_not_cached() -> None:
    before = math._same_cached.cache_info().currsize
    assert equal("2500", "+".join(["5"] * 500)) is True
    assert math._same_cached.cache_info().currsize == before


def test_a_long_unit_in_words_is_read_in_linear_time() -> None:
    """A pattern with several ways to divide the letters took twice the time for each further letter."""
    answer = r"\boxed{9.8 \text{meters per second squared downwards, towards the center (m/s^2)}}"
    assert grade(answer + "a" * 100, "9.8")["extracted"].startswith("9.8")
    assert grade(rf"\boxed{{5\,\mathrm{{{'a' * 60}^!}}}}", "6")["reward"] == 0.0
