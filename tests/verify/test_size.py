"""Answers too expensive to evaluate under any time limit: detected from their text, and wrong."""

from __future__ import annotations

import sys
import time

import pytest
import sympy
from sympy.core import random as sympy_random
from sympy.core.cache import clear_cache
from sympy.ntheory import primetest

from posttrain.verify import math
from posttrain.verify.complexity_limits import too_large
from posttrain.verify.math import equal, grade, prepare

HUGE = [
    "9^9^9^9",
    r"9^{9^{9^{9}}}",
    r"(9^9)^{9^9}",
    "2^{1000000000}",
    "2^{99999 \\cdot 99999}",
    r"10^{-10^{10}}",
    "100000000!",
    "(5!)!^9!",
    r"\binom{100000000}{50000000}",
    r"\prod_{n=1}^{10000000} n",
    r"\left\{10^{10^{10}}\right\}",
    "1" * 5000,
    "(" * 500 + "5" + ")" * 500,
    "a" * 10000,
    r"e^{e^{e^{e}}}",
    r"\sin(\exp(\exp(\exp 5)))",
    r"\Gamma(10^9)",
    r"\frac{1}{" * 13 + "2" + "}" * 13,
    r"\begin{vmatrix}" + r"a&b&c&d&e&f\\" * 6 + r"\end{vmatrix}",
    ",".join("1" * 300),
    r" \cup ".join(["(1,2)"] * 30),
]
FINE = [
    "2^{10000}",
    "2^{2^{10}}",
    "3^{3^{3}}",
    "2023!",
    r"6.022\times 10^{23}",
    r"\binom{2023}{1000}",
    r"\sum_{n=1}^{100} n^2",
    "x^{100000}",
    "e^{100000}",
    r"e^{x^{2}}",
    r"1+\frac{1}{" * 8 + "2" + "}" * 8,
    r"\begin{vmatrix}a&b\\c&d\end{vmatrix}",
    r"\{1,2,3\}",
    r"\frac{1}{10^{100}}",
    "1,000,000,000",
    "9" * 1000,
    "}{",
    "",
    "^",
    "!",
    "2^",
]


@pytest.mark.parametrize("text", HUGE)
def test_too_large_answer_is_wrong_immediately_and_invalid_as_gold(text: str) -> None:
    assert equal("5", "5")  # the library is imported
    started = time.monotonic()
    assert too_large(text)
    assert equal("5", text) is False
    assert equal(text, "5") is None
    assert grade(rf"\boxed{{{text}}}", "5")["reward"] == 0.0
    assert time.monotonic() - started < 5, "no number was worked out"


@pytest.mark.parametrize("text", FINE)
def test_usual_answers_are_parsed(text: str) -> None:
    assert not too_large(text)


def test_size_check_is_cheap_for_any_text() -> None:
    """Nested brackets, long runs of punctuation: at most MAX_CHARS characters and MAX_DEPTH levels are inspected."""
    started = time.monotonic()
    for text in ("{" * 2000, "^" * 2000, "!" * 2000, "9" * 2000, "{^{!}" * 400, "({[" * 10 + "9" * 1900):
        too_large(text)
    assert time.monotonic() - started < 1


LONG = "+".join(rf"\frac{{1}}{{x+{i}}}" for i in range(1, 25))


@pytest.mark.parametrize(
    ("gold", "candidate", "expected"),
    [
        ("(x+y+z)^{30}", "(x+y+z)^{31}", False),
        ("(x+y+z)^{30}", "(x+y+z)^{29}(x+y+z)", True),
        ("(a+b+c+d+e+f+g+h+j)^5", "abcdefghj", False),
        (LONG, f"{LONG}+1", False),
        (f"1+{LONG}", f"{LONG}+1", True),
        (r"\sqrt{2}+\sqrt{3}+\sqrt{5}", r"\sqrt{5}+\sqrt{7}", False),
        ("2^{10000}", "2^{10000}+1", False),
        ("x=5", r"\Gamma(10^3)", False),
        ("5", r"\int \frac{\sin x}{x^3+x+1} dx", False),  # left open
        ("5", r"\sum_{k=1}^{5} 1", False),
        ("((x+y+z)^{30},1)", "(x,1)", False),
        ("x^{50}+x+1=0", "x=5", False),
        ("x^{50}+x+1=0", "2x^{50}+2x+2=0", True),
        (r"\sqrt{x+\sqrt{x+\sqrt{x}}}=3", "x=5", False),
    ],
)
def test_large_formulas_are_compared_with_little_work(gold: str, candidate: str, expected: bool) -> None:
    prepare()
    assert equal(gold, candidate) is expected


SINES = "+".join(rf"\sin({i}x)" for i in range(1, 60))
ROOTS = ",".join(rf"\sqrt{{{i}}}" for i in range(2, 58))
# Hard for a comparison that rearranges, solves or evaluates.
HARD = [
    (r"\sqrt{10^{9000}+1}", "1"),
    (r"\sqrt{2024!+1}", "1"),
    (r"\sqrt{\frac{7^{3000}+1}{3^{3000}+1}}", r"\sqrt[3]{7^{3000}+1}"),
    (r"(10^{3000}+1)^{0.5}", r"\sqrt{x+10^{3000}}"),
    (r"e^{10^{9000}}", r"\exp(10^{9000})"),
    (r"x^{\sqrt{10^{3000}+1}}", r"2^{1/10^{3000}}"),
    (r"\pi^{10^{9000}}", r"\sqrt{10^{110}+7}\cdot\sqrt{10^{111}+7}"),
    (r"y=\sin t+\cos 2t", r"y=2\sin t+\cos 2t"),
    (
        r"\frac{\sin x}{x}+\frac{\sin y}{y}=\frac{1}{\sqrt{x+y}}",
        r"\frac{\sin x}{x}+\frac{\sin y}{y}=\frac{2}{\sqrt{x+y}}",
    ),
    (SINES, SINES.replace("59", "60")),
    (r"\sin(\cos(\tan(\sin(\cos(x+y+z)))))", r"\sin(\cos(\tan(\sin(\cos(z+y+x)))))+1"),
    ("e^{e^{x}}", "e^{e^x}+1"),
    ("(x!)!", "(y!)!"),
    ("x^{x^{x}}", "x^{x^x}+1"),
    (r"\binom{n}{1000}", r"\binom{n}{1001}"),
    (ROOTS, ROOTS.replace("57", "59")),
    (r"(1+\sqrt2)^{5000}", r"(3+2\sqrt{2})^{2501}"),
    (r"\sum_{k=1}^{1000} k^{50}", "5"),
    (r"\prod_{k=1}^{200} \sqrt{k+\sqrt{k}}", "5"),
    ("(x+1)" * 300, "(1+x)^{299}"),
    (r"\sin" * 400 + "x", "x"),
    (r"\log_2 " * 5 + "-3", "5"),
    (r"\ln " * 80 + "3", "1"),
    ("-" * 1900 + "5", "6"),
    ("(1," * 10 + r"\pm1" + ")" * 10, "5"),
    (r"\mathbf{" * 250 + "a" + "}" * 250, "5"),
    ("+".join(f"|x-{i}|" for i in range(30)), "+".join(f"|{i}-x|" for i in range(29))),
    ("5" + r"\ " * 900, "6"),
    ("x<" * 600 + "1", "y<" * 600 + "2"),
]
MOST_CALLS = 3_000_000  # two seconds or less; what sympy remembers of earlier tests makes it fewer


def calls_of(gold: str, candidate: str) -> int:
    """Return how many functions a comparison calls, independent of the load of the machine."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    math._parse_cached.cache_clear()
    sys.setprofile(counted)
    try:
        assert equal(gold, candidate) is not True
    finally:
        sys.setprofile(None)
    return count


def test_no_large_number_is_tested_for_primality(monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy tests primality in some of its random fact orders: without the limit in 17 of these 40."""
    prepare()
    tested: list[int] = []
    isprime = primetest.isprime
    monkeypatch.setattr(primetest, "isprime", lambda number: tested.append(int(number)) or isprime(number))
    try:
        for order in range(40):
            clear_cache()
            sympy_random.seed(order)
            value = sympy.log(sympy.Integer(10) ** 900 + 7) / sympy.log(3)
            assert value.is_finite and not value.args[0].is_zero
    finally:
        sympy_random.seed()
    assert max(tested, default=0) < 10**61
    assert sympy.Integer(7).is_prime and sympy.Integer(9).is_composite and (sympy.Integer(10) ** 900).is_prime is None


@pytest.mark.parametrize(("gold", "candidate"), [*HARD, *((b, a) for a, b in HARD)])
def test_work_is_bounded_by_size(gold: str, candidate: str) -> None:
    prepare()
    assert calls_of(gold, candidate) < MOST_CALLS


# Numbers of thousands of digits under a root or in an exponent, and many functions of numbers.
COSTLY = [
    r"\sqrt{10^{9000}+1}",
    r"\sin(\sqrt{10^{9000}+1})",
    r"\sqrt{10^{3000}+1}\cdot\sqrt{10^{3001}+1}",
    r"\sqrt{\frac{7^{3000}+1}{3^{3000}+1}}",
    r"\sqrt{2024!+1}",
    r"\sqrt[3]{10^{3000}+1}",
    r"(10^{3000}+1)^{2/7}",
    r"(10^{9000}+1)^{\sqrt2}",
    r"\sqrt{\binom{9000}{4500}+1}",
    r"e^{10^{9000}}",
    r"e^{-10^{9000}}",
    r"\pi^{10^{9000}}",
    r"(1+i)^{10^{9000}}",
    r"x^{\sqrt{10^{3000}+1}}",
    r"e^{\sqrt{10^{3000}}}",
    r"e^{e^{99999}}",
    r"\exp(\exp(9999999))",
    r"\pi^{\pi^{99999}}",
    r"2^{e^{999999}}",
    r"\sinh(10^{9000})",
    r"\cosh(e^{20})",
    r"\sin(e^{999999})",
    r"\sin(10^{9000})",
    r"\tan(7^{9999})",
    r"\ln(10^{9000}+1)",
    r"\log_3(10^{9000}+7)",
    r"\log_2(3^{9000})",
    r"\arctan(10^{9000})",
    "+".join(rf"\sin {i}^\circ" for i in range(1, 100)),
    "".join(rf"\sin {i}^\circ" for i in range(1, 90)),
    "+".join(rf"\tan {i}^\circ" for i in range(1, 90)),
    "+".join(rf"\log_{{{i}}} 2" for i in range(3, 120)),
    r"\prod_{k=1}^{200}\sin\frac{k\pi}{401}",
    r"\sum_{k=1}^{200}\sqrt{10^{k}+1}",
    r"\sum_{k=1}^{200} k^{k}",
]


@pytest.mark.parametrize("text", COSTLY)
def test_long_numbers_and_many_functions_cost_little(text: str) -> None:
    prepare()
    assert calls_of("1.5", text) < MOST_CALLS
    math.forget()
    started = time.process_time()
    assert equal("1.5", text) is False
    assert time.process_time() - started < 1, "0.2 s on an idle machine"
