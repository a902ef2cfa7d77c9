"""Ties, margins and the bound on how far a policy moves."""

from __future__ import annotations

import math
import random

import pytest

from posttrain.verify.stability import stability


def test_change_of_the_best_answer_is_detected() -> None:
    found = stability([1.0, 0.9], [0.9, 1.0], [-1.0, -1.0])
    assert (found.hard_tv, found.n_optimal, found.cliff) == (1.0, 1, True)
    assert found.margin == pytest.approx(0.1)


def test_tie_is_a_cliff_with_zero_margin() -> None:
    found = stability([1, 1, 0], [1, 1, 0], [-1, -2, -3])
    assert (found.hard_tv, found.soft_tv, found.n_optimal, found.cliff, found.margin) == (0, 0, 2, True, 1)


def test_equal_rewards_or_a_single_answer() -> None:
    assert stability([1.0], [0.2], [-1.0]).cliff is False
    assert stability([1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]).margin == 0


def test_constant_shift_changes_nothing() -> None:
    found = stability([1.0, 0.2], [1.5, 0.7], [-1.0, -1.0])
    assert found.hard_tv == 0
    assert found.soft_tv == pytest.approx(0, abs=1e-12)
    assert found.soft_bound == pytest.approx(0, abs=1e-12)


def test_bound_holds_and_is_tight_for_two_answers() -> None:
    """Log ratios 0.2 and -0.2 of two answers with w = 0.4: total variation tanh(0.1)."""
    tight = stability([0.0, 0.0], [0.0, 0.4], [0.2, 0.0], temperature=1.0)
    assert tight.soft_tv == pytest.approx(math.tanh(0.1))
    assert tight.soft_bound == pytest.approx(math.tanh(0.1))
    draw = random.Random(0)
    for _ in range(200):
        size = draw.randint(1, 5)
        lists = [[draw.gauss(0, 1) for _ in range(size)] for _ in range(3)]
        found = stability(*lists, temperature=draw.uniform(0.05, 2))
        assert found.soft_tv <= found.soft_bound + 1e-12
