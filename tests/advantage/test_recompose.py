"""Rows and groups that stay where brevity is the aim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.advantage.recompose import (
    count_admitted,
    keep_mixed_groups,
    mixed_plus_solved,
    priority,
    rorecomp,
    some_right,
)
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError

Groups = Callable[..., RolloutBatch]


def test_keep_rules(groups: Groups) -> None:
    batch = groups([[1, 0], [1, 1], [0, 0], [1], [None, 1]])
    assert keep_mixed_groups(batch).tolist() == [True] * 2 + [False] * 7
    assert some_right(batch).tolist() == [True] * 4 + [False] * 2 + [True] * 3


def test_solved_groups_are_admitted_in_order(groups: Groups) -> None:
    """kappa 1/2: as many solved groups as mixed ones; 1/3: half as many, rounded down."""
    batch = groups([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1], [0, 0]])
    assert mixed_plus_solved(batch, kappa=0.5)[::2].tolist() == [True, True, True, True, False, False]
    assert mixed_plus_solved(batch, kappa=1 / 3 + 1e-9)[::2].tolist() == [True, True, False, True, False, False]
    assert mixed_plus_solved(batch)[::2].tolist() == [False, True, False, True, False, False]
    assert mixed_plus_solved(batch, kappa=1.0)[::2].tolist() == [True] * 5 + [False]


@pytest.mark.parametrize(("kappa", "count"), [(-0.1, 0), (0.0, 0), (0.2, 2), (0.25, 3), (0.9, 7), (1.0, 7), (2.0, 7)])
def test_admitted(kappa: float, count: int) -> None:
    """Ten mixed, seven solved: 0.2 * 10 / 0.8 = 2.5, 0.25 * 10 / 0.75 = 3.33, 0.9 * 10 / 0.1 = 90."""
    assert count_admitted(kappa, 10, 7) == count


def test_priority(groups: Groups) -> None:
    """Two of three right rows, the shortest; one of two wrong rows, the longest; ties by row number."""
    batch = groups([[1, 1, 1, 0, 0], [1, 1, None, 0]], [[3, 1, 2, 4, 5], [2, 2, 9, 1]])
    assert priority(batch, alpha=0.5).tolist() == [False, True, True, False, True, True, False, False, True]
    assert priority(batch, alpha=1.0).tolist() == [True] * 7 + [False, True]
    selection = rorecomp(batch, alpha=0.5)
    assert selection.denominator == "kept"
    assert selection.mask.sum(-1).tolist() == [0, 1, 2, 0, 5, 2, 0, 0, 1]


@pytest.mark.parametrize("alpha", [0.0, 1.1])
def test_priority_refuses_a_share_that_is_none(alpha: float, groups: Groups) -> None:
    with pytest.raises(UserError, match="alpha"):
        priority(groups([[1, 0]]), alpha=alpha)
