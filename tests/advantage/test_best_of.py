"""Advantages for the best of several completions, and the length-weighted baseline: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.advantage.best_of import best_of_group, pass_k_training
from posttrain.advantage.group import group, opo
from posttrain.batch import RolloutBatch

NAN = float("nan")


def rows(rewards: list[float], group_ids: list[int] | None = None, **fields: Any) -> RolloutBatch:
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    ids = torch.tensor(group_ids or [0] * len(rewards))
    return RolloutBatch(ids, mask, torch.tensor(rewards, dtype=torch.float64), **fields)


def test_pass_at_2_of_one_right_and_two_wrong_rows() -> None:
    """Subsets of 2: two hold the right row, one does not. m = 2/3, s = sqrt(2/9). Right: (1 - 2/3) / s = sqrt(1/2);
    wrong: one of its two subsets holds the right row, (1/2 - 2/3) / s = -sqrt(1/8)."""
    found = pass_k_training(rows([0, 1, 0]), k=2)
    assert found.tolist() == pytest.approx([-math.sqrt(1 / 8), math.sqrt(1 / 2), -math.sqrt(1 / 8)])


def test_prompts_that_every_subset_solves_teach_nothing() -> None:
    """One wrong row of four: each subset of two has a right one."""
    assert pass_k_training(rows([1, 1, 0, 1]), k=2).tolist() == [0, 0, 0, 0]


def test_pass_at_1_is_the_normalized_reward() -> None:
    batch = rows([0.1, 0.7, 0.4, 1, 0, 0, NAN], [0, 0, 0, 1, 1, 1, 1])
    torch.testing.assert_close(pass_k_training(batch, k=1), group(batch, ddof=0, eps=0.0))


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6 / 3])
def test_equal_rewards_get_exactly_zero(reward: float) -> None:
    for found in (pass_k_training(rows([reward] * 5), k=2), best_of_group(rows([reward] * 5))):
        assert (found == 0).all()


def test_only_the_best_row_gets_its_lead() -> None:
    """0.9 leads 0.5 by 0.4; the other group's best is not unique; an unscored and a single row get 0."""
    batch = rows([0.5, 0.9, 0.1, 1, 1, NAN, 0.3], [0, 0, 0, 1, 1, 1, 2])
    assert best_of_group(batch, normalize=False).tolist() == pytest.approx([0, 0.4, 0, 0, 0, 0, 0])
    assert best_of_group(batch, eps=0.0)[1].item() == pytest.approx(0.4 / 0.4)  # std of 0.5, 0.9, 0.1 is 0.4


def test_long_rows_weigh_more_in_the_baseline() -> None:
    """(1 * 30 + 0 * 10) / 40 = 0.75; an unscored row has no weight; equal rewards give exactly 0."""
    batch = rows([1, 0, NAN, 0.1, 0.1, 0.1], [0, 0, 0, 1, 1, 1], lengths=torch.tensor([30, 10, 99, 1, 2, 3]))
    assert opo(batch).tolist() == pytest.approx([0.25, -0.75, 0, 0, 0, 0])
