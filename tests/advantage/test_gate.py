"""Gates of length rewards: by row, by group, by share of the batch, and after a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.advantage.gate import completion_lengths, evaluate_gate, group_pass_rates
from posttrain.advantage.keep import (
    balanced_difficulty_filter,
    keep_mixed_groups,
    mixed_plus_solved,
    row_pass_rates,
    some_right,
)
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.train import preflight

Groups = Callable[..., RolloutBatch]


def open_groups(batch: RolloutBatch, gate: Any) -> list[bool]:
    """Return for each group, in order of ids, whether it has an open row."""
    opened = evaluate_gate(batch, gate)
    return [bool(opened[batch.group_ids == group].any()) for group in batch.group_ids.unique()]


CORRECT = [[1, 1, 0, None], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]  # pass rates 2/3, 1/4, 1, 0


@pytest.mark.parametrize(
    ("gate", "groups_open"),
    [
        (None, [1, 1, 1, 1]),
        ({}, [1, 1, 1, 1]),
        ({"pass_rate": 1.0}, [0, 0, 1, 0]),
        ({"pass_rate": 0.25}, [1, 1, 1, 0]),
        ({"pass_rate": 0.0}, [1, 1, 1, 0]),  # no right row, so nothing to rank
        ({"top_share": 0.25}, [0, 0, 1, 0]),
        ({"top_share": 0.26}, [1, 0, 1, 0]),  # 1.04 groups, rounded up
        ({"top_share": 0.0}, [0, 0, 1, 0]),  # at least one
        ({"top_share": 1.0}, [1, 1, 1, 0]),
        ({"top_share": 0.5, "pass_rate": 0.7}, [0, 0, 1, 0]),
        ({"from_step": 3}, [1, 1, 1, 1]),
        ({"from_step": 4}, [0, 0, 0, 0]),
        ({"on": "format", "min": 1.0}, [0, 1, 0, 0]),
        ({"on": "format", "above": 1.0}, [0, 0, 0, 0]),
    ],
)
def test_gate_opens_groups_by_pass_rate_and_share(gate: Any, groups_open: list[int], groups: Groups) -> None:
    batch = groups(CORRECT, format=[[0, 0, None, 0], [0, 0, 0, 1], [0] * 4, [0] * 4], step=3)
    assert open_groups(batch, gate) == [bool(flag) for flag in groups_open]


def test_gate_opens_rows_by_component(groups: Groups) -> None:
    batch = groups([[1, 0, None]], length=[[0.5, None, 2.0]])
    assert evaluate_gate(batch, {"rows": "correct"}).tolist() == [True, False, False]
    assert evaluate_gate(batch, {"on": "length", "min": 0.5}).tolist() == [True, False, True]
    assert evaluate_gate(batch, {"on": "length", "above": 0.5}).tolist() == [False, False, True]
    assert evaluate_gate(batch, {"on": "correct", "min": 1.0}).tolist() == [True, False, False]


def test_ties_go_to_the_earlier_group(groups: Groups) -> None:
    assert open_groups(groups([[1, 0], [1, 0], [0, 0]]), {"top_share": 1 / 3}) == [True, False, False]


def test_top_share_is_not_rounded_up_by_floating_point_error(groups: Groups) -> None:
    """0.07 * 100 is 7.000000000000001 in floating point: 7 groups, not 8."""
    batch = groups([[1, 0]] * 100)
    assert sum(open_groups(batch, {"top_share": 0.07})) == 7


def test_unscored_rows_are_ignored_in_pass_rates(groups: Groups) -> None:
    """1 of 1 scored gives 1; none scored gives NaN, unlike the rate 0 of a group that failed."""
    batch = groups([[1, None], [None, None], [0, None]])
    key, rates = group_pass_rates(batch)
    assert rates.nan_to_num(nan=-1).tolist() == [1.0, -1.0, 0.0]
    assert batch.correct is not None
    assert torch.allclose(row_pass_rates(batch.correct, batch.group_ids), rates[key], equal_nan=True)
    assert preflight.correct_by_group(batch) == [(1, 1), (0, 1)]


def test_unscored_groups_are_never_selected(groups: Groups) -> None:
    """They are in no top share, in no difficulty band, and neither mixed nor solved."""
    batch = groups([[None, None], [1, 0], [1, 1]])
    assert open_groups(batch, {"top_share": 1.0}) == [False, True, True]
    assert open_groups(batch, {"top_share": 1 / 3}) == [False, False, True]
    for kept, rows in (
        (some_right(batch), [False, True, True]),
        (keep_mixed_groups(batch), [False, True, False]),
        (mixed_plus_solved(batch, kappa=1.0), [False, True, True]),
        (balanced_difficulty_filter(batch, t_low=0.0, t_high=1.0), [False, True, True]),
    ):
        assert kept.view(3, 2).all(-1).tolist() == kept.view(3, 2).any(-1).tolist() == rows


def test_unknown_component_raises_with_its_name(groups: Groups) -> None:
    with pytest.raises(UserError, match="no reward component `forma`"):
        evaluate_gate(groups([[1]], format=[[1]]), {"on": "forma", "min": 1.0})


def test_lengths_default_to_the_mask() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    batch = RolloutBatch(group_ids=torch.tensor([0, 0]), mask=mask)
    assert completion_lengths(batch).tolist() == [2.0, 0.0]
    assert completion_lengths(batch.replace(lengths=torch.tensor([7, 1]))).tolist() == [7.0, 1.0]
