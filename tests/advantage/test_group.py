"""Group-relative advantages: hand-computed values and invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.advantage.group import normalize_by_group, rank_in_group
from posttrain.batch import RolloutBatch

NAN = float("nan")
NAMES = ["group", "rloo"]  # invariants of all registry components are in test_laws.py


def advantages(rewards: list[float], group_ids: list[int], **settings: Any) -> list[float]:
    return normalize_by_group(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids), **settings).tolist()


def test_two_groups_are_normalized_separately() -> None:
    """(1, 0): mean 1/2, std sqrt(1/2). (3, 1, 2): mean 2, std 1. eps 0."""
    found = advantages([1, 0, 3, 1, 2], [0, 0, 1, 1, 1], eps=0.0)
    assert found == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 1.0, -1.0, 0.0])


def test_eps_is_added_to_the_std() -> None:
    assert advantages([3, 1, 2], [0, 0, 0], eps=1.0) == pytest.approx([0.5, -0.5, 0.0])


def test_ddof_zero_divides_by_the_number_of_rows() -> None:
    """(1, 0): variance (1/4 + 1/4) / 2, std 1/2."""
    assert advantages([1, 0], [0, 0], eps=0.0, ddof=0) == pytest.approx([1.0, -1.0])


def test_scale_none_only_centers() -> None:
    """k right of n: 1 - k/n and -k/n."""
    assert advantages([1, 0, 0, 0], [5, 5, 5, 5], scale="none") == [0.75, -0.25, -0.25, -0.25]


def test_scale_batch_divides_by_the_std_of_the_raw_rewards() -> None:
    """Rewards (2, 0), (10, 10), one unscored: raw mean 5.5, squares 12.25 + 30.25 + 2 * 20.25 = 83, std sqrt(83/3)."""
    std = math.sqrt(83 / 3)
    found = advantages([2, 0, 10, 10, NAN], [0, 0, 1, 1, 1], scale="batch", eps=0.0)
    assert found == pytest.approx([1 / std, -1 / std, 0.0, 0.0, 0.0])


def test_group_ids_are_arbitrary_labels() -> None:
    """Rows of a group need not be neighbours, ids need not start at 0 or follow each other."""
    found = advantages([1, 3, 0, 1, 2], [9, -4, 9, -4, -4], eps=0.0)
    assert found == pytest.approx([math.sqrt(0.5), 1.0, -math.sqrt(0.5), -1.0, 0.0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 / 3, -7.7])
def test_equal_rewards_get_exactly_zero(scale: str, eps: float, reward: float) -> None:
    """0.1 three times has a mean that is not 0.1 in floating point: a tiny std must not amplify the rounding error."""
    assert advantages([reward] * 3, [0, 0, 0], scale=scale, eps=eps) == [0.0, 0.0, 0.0]
    mixed = advantages([reward] * 3 + [0.0, 5.0], [0, 0, 0, 1, 1], scale=scale, eps=eps)
    assert mixed[:3] == [0.0, 0.0, 0.0]
    assert mixed[4] > 0 > mixed[3]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscored_row_gets_zero_and_changes_no_other_row(scale: str) -> None:
    with_it = advantages([1, NAN, 0, 1], [0, 0, 0, 0], scale=scale)
    without = advantages([1, 0, 1], [0, 0, 0], scale=scale)
    assert with_it[1] == 0.0
    assert [with_it[0], *with_it[2:]] == without
    assert advantages([NAN, NAN], [0, 0], scale=scale) == [0.0, 0.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_with_one_scored_row_gets_zero(scale: str) -> None:
    rewards, groups = [3.0, NAN, 1.0, 0.0, 2.0], [0, 0, 1, 1, 2]
    zero = advantages(rewards, groups, scale=scale)
    raw = advantages(rewards, groups, scale=scale, singleton="raw")
    assert [zero[0], zero[1], zero[4]] == [0.0, 0.0, 0.0]
    assert [raw[0], raw[1], raw[4]] == [3.0, 0.0, 2.0]
    assert raw[2:4] == zero[2:4]


def test_rank_in_group_orders_by_descending_value() -> None:
    """Group 0 has 2, 5, 5 in rows 0, 2, 4, ranked: first 5, second 5, 2. Group 1 has 3 and 7."""
    values, key = torch.tensor([2.0, 3.0, 5.0, 7.0, 5.0]), torch.tensor([0, 1, 0, 1, 0])
    assert rank_in_group(values, key).tolist() == [2, 1, 0, 0, 1]
    assert rank_in_group(values[:0], key[:0]).tolist() == []


def test_empty_batch_gives_no_advantages() -> None:
    assert advantages([], []) == []


def test_advantages_are_invariant_to_shift_and_scale_of_a_group() -> None:
    base = advantages([1, 0, 0, 2, 5], [0, 0, 0, 1, 1], eps=0.0)
    assert advantages([11, 10, 10, 2, 5], [0, 0, 0, 1, 1], eps=0.0) == pytest.approx(base)
    assert advantages([7, 0, 0, 2, 5], [0, 0, 0, 1, 1], eps=0.0) == pytest.approx(base)


def rows(rewards: list[float], group_ids: list[int], dtype: torch.dtype = torch.float64) -> RolloutBatch:
    return RolloutBatch(
        group_ids=torch.tensor(group_ids),
        mask=torch.ones(len(rewards), 2, dtype=torch.bool),
        rewards=torch.tensor(rewards, dtype=dtype),
    )


@pytest.mark.parametrize("name", NAMES)
class TestLaws:
    def test_a_group_of_one_gets_zero(self, name: str) -> None:
        assert not registry.get("advantage", name).function(rows([1.0, 5.0], [0, 1])).any()

    def test_equal_rewards_get_zero(self, name: str) -> None:
        assert not registry.get("advantage", name).function(rows([0.3] * 4, [0, 0, 1, 1])).any()

    def test_advantages_carry_no_gradient(self, name: str) -> None:
        batch = rows([1.0, 0.0], [0, 0])
        assert batch.rewards is not None
        batch.rewards.requires_grad_()
        assert not registry.get("advantage", name).function(batch).requires_grad

    def test_float32_is_close_to_float64(self, name: str) -> None:
        function = registry.get("advantage", name).function
        rewards, groups = [0.31, 1.7, -0.4, 0.9, 0.91], [0, 0, 0, 1, 1]
        single = function(rows(rewards, groups, torch.float32))
        torch.testing.assert_close(single.double(), function(rows(rewards, groups)), rtol=1e-3, atol=1e-5)

    def test_the_order_of_rows_does_not_matter(self, name: str) -> None:
        function = registry.get("advantage", name).function
        batch, order = rows([0.3, 1.7, -0.4, 0.9, 0.2], [0, 1, 0, 1, 0]), [3, 0, 4, 2, 1]
        torch.testing.assert_close(function(batch.select(order)), function(batch)[order])
