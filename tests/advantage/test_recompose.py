"""Selection of rows by length and correctness for training towards brevity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.advantage.recompose import rorecomp, select_priority_rows
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError

Groups = Callable[..., RolloutBatch]


def test_priority_keeps_shortest_right_and_longest_wrong_rows(groups: Groups) -> None:
    """Two of three right rows, the shortest; one of two wrong rows, the longest; ties go by row number."""
    batch = groups([[1, 1, 1, 0, 0], [1, 1, None, 0]], [[3, 1, 2, 4, 5], [2, 2, 9, 1]])
    assert select_priority_rows(batch, alpha=0.5).tolist() == [False, True, True, False, True, True, False, False, True]
    assert select_priority_rows(batch, alpha=1.0).tolist() == [True] * 7 + [False, True]
    selection = rorecomp(batch, alpha=0.5)
    assert selection.denominator == "kept"
    assert selection.mask.sum(-1).tolist() == [0, 1, 2, 0, 5, 2, 0, 0, 1]


@pytest.mark.parametrize("alpha", [0.0, 1.1])
def test_priority_with_an_invalid_share_raises(alpha: float, groups: Groups) -> None:
    with pytest.raises(UserError, match="alpha"):
        select_priority_rows(groups([[1, 0]]), alpha=alpha)
