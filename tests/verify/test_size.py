"""Answers that would cost more than any limit of time: found by their looks, and wrong."""

from __future__ import annotations

import time

import pytest

from posttrain.verify.math import equal, grade
from posttrain.verify.size import too_large

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
def test_too_large_is_wrong_at_once_and_no_gold(text: str) -> None:
    assert equal("5", "5")  # the library is imported
    started = time.monotonic()
    assert too_large(text)
    assert equal("5", text) is False
    assert equal(text, "5") is None
    assert grade(rf"\boxed{{{text}}}", "5")["reward"] == 0.0
    assert time.monotonic() - started < 5, "no number was worked out"


@pytest.mark.parametrize("text", FINE)
def test_what_people_write_is_read(text: str) -> None:
    assert not too_large(text)


def test_the_look_costs_little_whatever_the_text() -> None:
    """Brackets within brackets, long rows of marks: no more than LONGEST characters, DEEPEST deep, are looked at."""
    started = time.monotonic()
    for text in ("{" * 2000, "^" * 2000, "!" * 2000, "9" * 2000, "{^{!}" * 400, "({[" * 10 + "9" * 1900):
        too_large(text)
    assert time.monotonic() - started < 1
