"""Length rewards: hand-computed values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

Reward = Callable[[str], Callable[..., Any]]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**6, -1.0)]
)
def test_soft_overlong_with_the_papers_settings(length: int, expected: float, reward: Reward) -> None:
    """Free up to 20480 - 4096 = 16384; 18432 is 2048 of 4096 over."""
    assert reward("length.soft_overlong")("", length, max_length=20480, buffer=4096) == expected


def test_soft_overlong_scales_with_factor_and_steps_without_a_buffer(reward: Reward) -> None:
    soft = reward("length.soft_overlong")
    assert soft("", 90, max_length=100, buffer=20, factor=0.4) == pytest.approx(-0.2)
    assert soft("", 150, max_length=100, buffer=20, factor=0.4) == pytest.approx(-0.4)
    assert [soft("", n, max_length=100, buffer=0) for n in (99, 100, 101)] == [0.0, 0.0, -1.0]


def test_soft_overlong_is_continuous_and_non_increasing(reward: Reward) -> None:
    values = [reward("length.soft_overlong")("", n, max_length=50, buffer=20) for n in range(70)]
    steps = [a - b for a, b in itertools.pairwise(values)]
    assert all(0 <= step <= 1 / 20 + 1e-12 for step in steps)


def test_truncation_penalty(reward: Reward) -> None:
    truncation = reward("length.truncation")
    assert truncation("", 44, True, max_length=44) == 1.0
    assert truncation("", 45, True, max_length=44) == 0.0
    assert truncation("", 44, True, True, max_length=44) == 0.0
    assert truncation("", 1, False, max_length=44) == 0.0
    assert truncation("", 1, None, max_length=44) is None


@pytest.mark.parametrize(
    ("length", "correct", "truncated", "expected"),
    [
        (0, 1, False, 2.0),  # k = 1
        (500, 1, False, 1.5),  # k = 1/2
        (500, 0, False, -5.0),
        (0, 0, False, -10.0),
        (250, 1, None, 1 + (1 + math.sqrt(0.5)) / 2),  # cos(pi/4)
        (983, 0, False, -10 * (1 + math.cos(math.pi * 0.983)) / 2),
        (984, 1, False, -10.0),  # 984 + 16 = 1000
        (5000, 1, False, -10.0),
        (5, 1, True, -10.0),
        (5, None, False, None),
        (5, None, True, -10.0),
    ],
)
def test_cosine_values(length: int, correct: Any, truncated: Any, expected: float | None, reward: Reward) -> None:
    assert reward("length.cosine")("", length, correct, truncated, max_length=1000) == pytest.approx(expected)


def test_cosine_is_monotone_and_right_beats_wrong(reward: Reward) -> None:
    cosine = reward("length.cosine")
    right = [cosine("", n, True, max_length=200) for n in range(184)]
    wrong = [cosine("", n, False, max_length=200) for n in range(184)]
    assert all(a > b for a, b in itertools.pairwise(right))
    assert all(a < b for a, b in itertools.pairwise(wrong))
    assert min(right) > max(wrong)


def test_cosine_is_constant_beyond_its_limit(reward: Reward) -> None:
    params = {"max_length": 100, "margin": 0, "exceed_reward": -1.0, "min_value_correct": 0.5, "max_value_correct": 1.0}
    assert [reward("length.cosine")("", n, True, **params) for n in (100, 150, 200)] == [-1.0, -1.0, -1.0]


def test_open_rs_is_monotone_and_right_beats_wrong(reward: Reward) -> None:
    open_rs = reward("length.open_rs")
    right = [open_rs("", n, True, max_length=100) for n in range(150)]
    wrong = [open_rs("", n, False, max_length=100) for n in range(150)]
    assert all(a >= b for a, b in itertools.pairwise(right))
    assert all(a <= b for a, b in itertools.pairwise(wrong))
    assert min(right) == pytest.approx(0.5) and max(wrong) == pytest.approx(-0.5)
    assert open_rs("a" * 200, 3, True, max_length=100, unit="characters", clamp=False) == pytest.approx(1.0)


def test_budget_rewards_peak_at_the_budget(reward: Reward) -> None:
    exact = [reward("length.l1_exact")("", n, 50, True) for n in range(100)]
    most = [reward("length.l1_max")("", n, 50, True, alpha=0.01) for n in range(200)]
    assert exact.index(max(exact)) == 50 and exact[40] == exact[60]
    assert all(a >= b for a, b in itertools.pairwise(most))
    assert (most[0], most[50], most[-1]) == (1.0, 0.5, 0.0)


def test_token_repetition_does_not_depend_on_token_ids(reward: Reward) -> None:
    repetition = reward("length.ngram_repetition")
    assert repetition("", [1, 2, 1, 2, 1], ngram_size=2) == repetition("", [7, 9, 7, 9, 7], ngram_size=2) == -0.5
