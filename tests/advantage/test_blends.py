"""Question bundles (RiskPO), batch-level advantages (COPO), hints, and rewards over groups: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.advantage.consistency import copo, copo_terms
from posttrain.advantage.hints import hint_advantages, protect_hint_tokens
from posttrain.advantage.reward_mix import hybrid, rank_rewards
from posttrain.advantage.risk import risk_terms, riskpo
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.loss.channels import clip_channels
from posttrain.loss.clip import clip
from posttrain.variants.help import hint_ratio

NAN = float("nan")


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(group_ids: list[int], rewards: list[float], **fields: Any) -> RolloutBatch:
    mask = torch.ones(len(group_ids), 1, dtype=torch.bool)
    return RolloutBatch(torch.tensor(group_ids), mask, column(*rewards), **fields)


def test_risk_advantages_are_never_positive_and_rise_with_the_score() -> None:
    """q 1 and 3, omega 1: slope 2 below 1, slope 1 up to 3, then 0; two questions a bundle."""
    rewards = torch.tensor([[0, 1, 1, 2, 3, 4], [0, 0, 1, 1, 1, 1]], dtype=torch.float64)
    found = risk_terms(rewards, torch.zeros(2), q_lo=1.0, q_hi=3.0, omega=1.0)
    assert found.bundle_scores.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert found.bundle_advantages.tolist() == [[-4, -2, -1, 0, 0, 0]]
    assert found.advantages.tolist() == [-4, -2, -1, 0, 0, 0] * 2


def test_quantiles_move_towards_their_target_level() -> None:
    """Scores 0 and 2: none is below 0, half are below 1; the first step keeps the batch's quantiles."""
    rewards = torch.tensor([[0, 2]], dtype=torch.float64)
    found = risk_terms(rewards, torch.zeros(1), q_lo=0.0, q_hi=1.0, alpha=0.2, beta=0.8, lr_q=0.5)
    assert found.q_next == pytest.approx((0.1, 1.15))
    assert risk_terms(rewards, torch.zeros(1)).q_next == pytest.approx((0.4, 1.6))


def test_credit_by_distance_sums_to_the_bundle_advantage() -> None:
    """Sample 0: distances 1/2 and 1; sample 1: -1/2 and -1. If the distances cancel, all rows get the same credit."""
    rewards = torch.tensor([[1, 0], [2, 0]], dtype=torch.float64)
    found = risk_terms(rewards, torch.zeros(2), q_lo=1.0, q_hi=4.0, credit="sum_mean")
    a = found.bundle_advantages[0]
    torch.testing.assert_close(found.advantages.reshape(2, 2), torch.stack([a / 3, a * 2 / 3]))
    flat = risk_terms(torch.ones(2, 2).double(), torch.zeros(2), q_lo=1.0, q_hi=4.0, credit="sum_mean")
    torch.testing.assert_close(flat.advantages.reshape(2, 2), (flat.bundle_advantages / 2).expand(2, 2))


def test_unscored_row_drops_only_its_bundle() -> None:
    rewards = torch.tensor([[1, NAN], [1, 0], [0, 1], [0, 0]], dtype=torch.float64)
    found = risk_terms(rewards, torch.tensor([0, 0, 1, 1]), q_lo=2.0, q_hi=3.0)
    assert found.bundle_scores.isnan().all(1).tolist() == [True, False]
    assert not found.advantages[:4].any()
    assert found.advantages[4:].all()


def test_riskpo_keeps_quantiles_across_steps_and_raises_for_incomplete_bundles() -> None:
    batch = rows([4, 4, 2, 2], [1, 0, 1, 1])
    first = riskpo(batch, bundle_size=2)
    assert first.memory == pytest.approx({"q_lo": 1.2, "q_hi": 1.8})
    second = riskpo(batch.replace(memory={"riskpo": first.memory}), bundle_size=2)
    assert second.memory["q_lo"] == pytest.approx(1.2 + 0.1 * (0.2 - 0.5))
    with pytest.raises(UserError, match="bundles of 3"):
        riskpo(batch, bundle_size=3)
    with pytest.raises(UserError, match="sizes"):
        riskpo(batch.select([0, 1, 2]), bundle_size=1)


def answer_terms(mode: str = "soft", **settings: Any) -> Any:
    """Return the terms of one mixed group whose answers differ (1 bit) and one all-right group that agrees (0 bits)."""
    batch = rows([0, 0, 1, 1], [1, 0, 1, 1], answer_ids=torch.tensor([0, 1, 2, 2]))
    return copo_terms(batch, mode=mode, **settings)


def test_copo_weights_the_batch_advantage_more_if_answers_agree() -> None:
    """H = 1 and 0 bits, k 5, b 1: sigmoid(0) and sigmoid(-5). Means 1/2 and 1: std 0.3536, +-0.7071."""
    found = answer_terms()
    assert found.entropy.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert found.weight.tolist() == pytest.approx([0.5, 0.5, 1 / (1 + math.exp(5)), 1 / (1 + math.exp(5))], rel=1e-5)
    assert found.overall.tolist() == pytest.approx([-(0.5**0.5)] * 2 + [0.5**0.5] * 2, rel=1e-5)
    assert found.local.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "weight"),
    [
        ("only_local", [1, 1, 1, 1]),
        ("only_global", [0, 0, 0, 0]),
        ("only_zero", [1, 0, 1, 1]),
        ("only_forced", [1, 1, 0, 0]),
        ("soft_with_zero", [0.5, 0, 0.0067, 0.0067]),
        ("soft_with_forced", [0.5, 0.5, 0, 0]),
    ],
)
def test_copo_modes_set_the_local_weight(mode: str, weight: list[float]) -> None:
    assert answer_terms(mode).weight.tolist() == pytest.approx(weight, abs=1e-4)


def test_missing_answers_are_one_category_and_use_coef_lowers_the_reward() -> None:
    """Both rows without an answer: 0 bits. With use_coef a prompt of 2 rows and 1 bit loses the fraction (1 - 1/2) / 1
    of its reward."""
    batch = rows([0, 0, 1, 1], [1, 0, 0.5, 0.5], answer_ids=torch.tensor([0, 1, -1, -1]))
    assert copo_terms(batch).entropy.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert not copo_terms(batch).overall.any()
    assert copo_terms(batch, use_coef=True).overall.tolist() == pytest.approx(
        [-(0.5**0.5)] * 2 + [0.5**0.5] * 2, rel=1e-4
    )


def test_channel_surrogates_equal_one_surrogate_until_a_ratio_is_clipped() -> None:
    batch = rows([0, 0, 1, 1], [1, 0, 1, 1], answer_ids=torch.tensor([0, 1, 2, 2]))
    found = copo(batch, mode="soft")
    batch = batch.replace(advantages=found.total, channels=found.channels, old_logp=torch.zeros(4, 1).double())
    near, far = torch.full((4, 1), 0.1).double(), torch.full((4, 1), 1.0).double()
    torch.testing.assert_close(clip_channels(batch, near).values, clip(batch, near).values)
    assert not torch.allclose(clip_channels(batch, far).values, clip(batch, far).values)


def test_hinted_and_plain_rows_are_normalized_apart_and_shifted_by_the_gap() -> None:
    """Plain 0, 1 (mean 1/2), hinted 1, 1, 1, 0 (3/4): D = 1/4. Population stds 1/2 and sqrt(3)/4."""
    rewards = column(0, 1, 1, 1, 1, 0)
    hinted = torch.arange(6) >= 2
    found, gap = hint_advantages(rewards, torch.zeros(6).long(), hinted, eps=0.0)
    assert gap.tolist() == [0.25]
    third = 3**-0.5
    assert found.tolist() == pytest.approx([-0.75, 1.25, *[0.75 * third] * 3, -1.25 * 3**0.5])
    one_sided, _ = hint_advantages(rewards, torch.zeros(6).long(), hinted, eps=0.0, variant="one_sided")
    assert one_sided.tolist() == pytest.approx([-1, 1.25, *[third] * 3, -1.25 * 3**0.5])


def test_hint_gap_is_zero_without_plain_rows() -> None:
    found, gap = hint_advantages(column(1, 0), torch.zeros(2).long(), torch.ones(2).bool(), eps=0.0)
    assert gap.tolist() == [0.0]
    assert found.tolist() == [1.0, -1.0]


def test_hint_tokens_get_no_negative_advantage() -> None:
    mask = torch.tensor([[True, True, False]] * 2)
    hint = torch.tensor([[True, False, False]] * 2)
    assert protect_hint_tokens(column(2, -2), hint, mask).tolist() == [[2, 2, 0], [0, -2, 0]]


def test_harder_prompts_get_longer_hints() -> None:
    assert hint_ratio([1, 0, None], w_min=0.2, w_max=0.8) == pytest.approx(0.5)
    assert hint_ratio([None]) == 0.8
    assert hint_ratio([1.0], noise=-0.1) == 0.0


def test_rank_rewards_for_well_separated_predictions() -> None:
    """Each item predicts one number, far apart: right order 1, wrong order 0 (up to eps), an equal pair 1/sqrt(2)."""
    groups = torch.tensor([0, 0, 1, 1])
    right = rank_rewards(column(5, 5, 0, 0), column(2, 2, 1, 1), groups)
    assert right.tolist() == pytest.approx([1] * 4, abs=2e-3)
    assert rank_rewards(column(0, 0, 5, 5), column(2, 2, 1, 1), groups).tolist() == pytest.approx([0] * 4, abs=3e-3)
    assert rank_rewards(column(1, 1, 1, 1), column(2, 2, 1, 1), groups).tolist() == pytest.approx(
        [0.5**0.5] * 4, abs=2e-3
    )


def test_rank_rewards_skip_missing_predictions_and_other_sources() -> None:
    groups = torch.tensor([0, 0, 1])
    found = rank_rewards(column(5, NAN, 0), column(2, 2, 1), groups)
    assert found.tolist() == pytest.approx([1, 0, 1], abs=2e-3)
    assert not rank_rewards(column(5, 5, 0), column(2, 2, 1), groups, column(7, 7, 8)).any()
    assert not rank_rewards(column(5, 4), column(2, 2), torch.tensor([0, 0])).any()


def test_reward_model_is_capped_and_missing_components_are_skipped() -> None:
    """sigmoid(0) = 1/2, capped at 0.2: 1 + 0.5 * 0.2 + 0.5."""
    parts = {"rule": column(1, 1, NAN), "rm": column(0, NAN, NAN), "format": column(1, 1, NAN)}
    batch = RolloutBatch(torch.zeros(3).long(), torch.ones(3, 1).bool(), components=parts)
    assert hybrid(batch, rm_cap=0.2)[:2].tolist() == pytest.approx([1.6, 1.5])
    assert hybrid(batch)[2].isnan()
