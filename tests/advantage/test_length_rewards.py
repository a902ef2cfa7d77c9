"""Group length rewards: hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.advantage.length_rewards import (
    kimi_length,
    kimi_term,
    length_zscore,
    remaining_length,
    select_target_lengths,
    truncation_tiers,
)
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError

Groups = Callable[..., RolloutBatch]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_kimi_length_reward(groups: Groups) -> None:
    """Lengths 10, 20, 30: t = 1/2, 0, -1/2. A wrong short row gets min(0, 1/2) = 0, a wrong long row -1/2."""
    batch = groups([[1, 0, 0], [1, 1, None], [0]], [[10, 20, 30], [5, 5, 5], [9]])
    assert kimi_term(batch).nan_to_num(nan=9.0).tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 9.0, 0.0]
    rewards = kimi_length(batch, weight=0.4)
    assert rewards[:5].tolist() == pytest.approx([1.2, 0.0, -0.2, 1.0, 1.0])
    assert rewards[5].isnan()


def test_kimi_gives_short_wrong_rows_zero_and_is_invariant_to_affine_lengths(groups: Groups) -> None:
    correct, lengths = [[0, 1, 1, 0]], [[10, 20, 40, 50]]
    term = kimi_term(groups(correct, lengths))
    assert term[0] == 0.0
    assert torch.equal(term, kimi_term(groups(correct, [[3 * n + 7 for n in lengths[0]]])))


def test_kimi_is_zero_before_its_start_step(groups: Groups) -> None:
    before, after = (groups([[1, 1]], [[10, 20]], step=step) for step in (99, 100))
    assert kimi_length(before, gate={"from_step": 100}).tolist() == [1.0, 1.0]
    assert kimi_length(after, gate={"from_step": 100}).tolist() == [1.25, 0.75]


def test_zscore_applies_to_right_rows_only(groups: Groups) -> None:
    """Right rows of 10 and 30 tokens: mean 20, population std 10, z = -1, 1. The wrong row keeps its reward."""
    batch = groups([[1, 1, 0], [1, 0, 0]], [[10, 30, 90], [50, 1, 1]])
    expected = [1 - 0.2 * sigmoid(-1), 1 - 0.2 * sigmoid(1), 0, 0.9, 0, 0]  # a single right row: z = 0
    assert length_zscore(batch, eps=0.0).tolist() == pytest.approx(expected)
    gated = length_zscore(batch, eps=0.0, gate={"pass_rate": 0.5}).tolist()
    assert gated == pytest.approx([*expected[:3], 1, 0, 0])


def test_zscore_of_extreme_lengths_is_finite_and_bounded(groups: Groups) -> None:
    rewards = length_zscore(groups([[1] * 50]), alpha=0.5)
    assert rewards.tolist() == pytest.approx([0.75] * 50)
    rewards = length_zscore(groups([[1] * 40], [[1] * 39 + [3000]]), alpha=0.5)
    assert bool(((rewards > 0.5) & (rewards < 1)).all())


def test_remaining_length_is_added_in_gated_groups(groups: Groups) -> None:
    """Half of the context remains: + 1/2. Beyond max_length nothing remains. Mixed groups keep 0 and 1 exactly."""
    batch = groups([[1, 1], [1, 0]], [[5, 20], [1, 1]])
    assert remaining_length(batch, max_length=10, gate={"pass_rate": 1.0}).tolist() == [1.5, 1.0, 1.0, 0.0]
    assert remaining_length(batch, max_length=10, weight=2.0)[0] == 2.0
    with pytest.raises(UserError, match="max_length 0"):
        remaining_length(batch, max_length=0)


def test_tier_targets_follow_the_pass_rate(groups: Groups) -> None:
    """Two of four right: q = 1/2 equals the threshold, the easier tier. Second group: the right row of 41 tokens
    exceeds the largest target, so q = 1/4."""
    batch = groups([[1, 1, 0, 0], [1, 1, 0, 0]], [[19, 30, 1, 1], [41, 30, 1, 1]])
    keys = {"thresholds": (0.5,), "target_lengths": (40, 20)}
    found = select_target_lengths(batch, **keys)  # type: ignore[arg-type]
    assert found["ratio"].tolist() == [0.5, 0.25]
    assert found["target_length"].tolist() == [20.0, 40.0]
    assert truncation_tiers(batch, **keys).tolist() == [1, 0, 0, 0, 0, 1, 0, 0]  # type: ignore[arg-type]


def test_tiers_never_soften_a_penalty(groups: Groups) -> None:
    batch = groups([[0, 0]], [[30, 30]], rewards=[[-0.5, 0.5]])
    assert truncation_tiers(batch, target_lengths=(20, 10)).tolist() == [-0.5, 0.0]


def test_tiers_with_a_wrong_number_of_targets_raise(groups: Groups) -> None:
    with pytest.raises(UserError, match="2 levels"):
        truncation_tiers(groups([[1]]), target_lengths=(10,))
