"""Beta-normalized advantages and advantages per environment step: hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.advantage.beta import beta_norm, beta_normalized
from posttrain.advantage.episodes import step_gae, step_terms
from posttrain.advantage.group import rloo
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError

F64 = torch.float64


def batch(rewards: list[list[float]]) -> RolloutBatch:
    ids = torch.tensor([group for group, row in enumerate(rewards) for _ in row])
    flat = torch.tensor([x for row in rewards for x in row], dtype=F64)
    return RolloutBatch(ids, torch.ones(len(flat), 1, dtype=torch.bool), rewards=flat)


def test_one_prompt_gives_mean_centered_rewards() -> None:
    assert beta_norm(batch([[1.0, 0.0, 1.0, 0.0]])).tolist() == [0.5, -0.5, 0.5, -0.5]


def test_rewards_outside_the_range_raise() -> None:
    """They once gave NaN. Weights that sum to 1 up to rounding pass, and unscored rows are ignored."""
    penalised = batch([[1.0, -0.5, -0.5, -0.5], [1.0, 0.0, 1.0, math.nan]])
    with pytest.raises(UserError, match=r"rewards from -0\.5 to 1"):
        beta_norm(penalised)
    wide = beta_norm(penalised, reward_min=-0.5)
    assert wide.isfinite().all() and wide[7] == 0 and wide[0] > 0
    above = 0.1 + 0.2 + 0.7  # 1 plus a rounding error
    assert beta_norm(batch([[above, above], [1.0, 0.0]])).isfinite().all()


def test_only_scored_row_of_a_group_gets_zero() -> None:
    """Treated as a group of one, the row once got R / f(0), up to weight_max."""
    found = beta_norm(batch([[1.0, math.nan, math.nan], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    assert found[:3].tolist() == [0, 0, 0] and float(found.abs().max()) < 2


def test_beta_parameters_for_symmetric_pass_rates() -> None:
    """p = (1/4, 3/4): mu 1/2, var 1/8, s = 1/4 / (1/8) - 1 = 1, a = b = 1/2, alpha = beta = 7/6."""
    found = beta_normalized(batch([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
    assert (found.alpha.item(), found.beta.item()) == pytest.approx((7 / 6, 7 / 6))
    density = math.gamma(7 / 3) / math.gamma(7 / 6) ** 2 * (3 / 16) ** (1 / 6)
    assert found.weights.tolist() == pytest.approx([1 / density] * 2)
    assert found.advantages[0].item() == pytest.approx(0.75 / density)


def test_alpha_beta_of_three_halves_equal_the_std_up_to_a_constant() -> None:
    """alpha = beta = 3/2: f = (8 / pi) sqrt(p (1 - p)). Pass rates 0, 1/2, 1: mu 1/2, var 1/4: s = 0 -> 1, not 3/2; for
    3/2 s = 3: var 1/16, so p = 1/4, 1/2, 3/4."""
    found = beta_normalized(batch([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]))
    assert (found.alpha.item(), found.beta.item()) == pytest.approx((1.5, 1.5))
    assert found.weights[1].item() == pytest.approx(math.pi / 8 / 0.5)


def test_uniform_groups_and_unscored_rows_get_zero() -> None:
    found = beta_norm(batch([[1, 1, 1, 1], [1, 0, float("nan"), 0], [0, 0, 0, 0], [1, 0, 1, 0]]))
    assert not found.isnan().any()
    assert found[:4].tolist() == [0.0] * 4
    assert found[6].item() == 0.0
    assert found[8:12].tolist() == [0.0] * 4


def test_one_step_episodes_get_reward_minus_value() -> None:
    found = step_terms(*(torch.tensor(x, dtype=F64) for x in ([1.0, 0.5], [0.2, 0.1], [1, 1])))
    assert found.raw.tolist() == pytest.approx([0.8, 0.4])
    assert found.returns.tolist() == pytest.approx([1.0, 0.5])


def test_credit_does_not_cross_episodes() -> None:
    """gamma 0.5, lam 0.5. Step 3 (done): 4 - 0 = 4. Step 2 (done): 1 - 0. Step 1: 0 + 0.5 * 0 - 0 + 0.25 * 1."""
    rewards, values, dones = (torch.tensor(x, dtype=F64) for x in ([0, 1, 4], [0, 0, 0], [0, 1, 1]))
    found = step_terms(rewards, values, dones, gamma=0.5, lam=0.5)
    assert found.raw.tolist() == pytest.approx([0.25, 1.0, 4.0])
    cut = step_terms(rewards, values, torch.tensor([0, 1, 0]), gamma=0.5, lam=0.5, bootstrap_value=2.0)
    assert cut.raw.tolist() == pytest.approx([0.25, 1.0, 5.0])


def test_step_advantages_are_assigned_to_the_tokens_of_the_step() -> None:
    """Values are read at a step's first trained token: 0.5 and 0.25. raw 0.5 and -0.25: normalised +-1 / sqrt 2."""
    rows = RolloutBatch(
        torch.arange(2),
        torch.tensor([[1, 1], [1, 0]], dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0], dtype=F64),
        values=torch.tensor([[0.5, 9.0], [0.25, 8.0]], dtype=F64),
        turn_ids=torch.zeros(2, 2, dtype=torch.long),
    )
    found = step_gae(rows)
    half = math.sqrt(0.5)
    torch.testing.assert_close(
        found.advantages, torch.tensor([[half, half], [-half, 0]], dtype=F64), rtol=1e-6, atol=1e-6
    )
    assert found.returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_single_step_gets_zero() -> None:
    one = torch.ones(1, dtype=F64)
    assert step_terms(one, one * 0.3, one).advantages.tolist() == [0.0]


def test_rloo_can_be_normalized_over_the_batch() -> None:
    """Groups (1, 0) and (1, 1): A = (1, -1, 0, 0), mean 0, std sqrt(2/3); the unscored row stays 0 and is not
    counted."""
    found = rloo(batch([[1.0, 0.0, float("nan")], [1.0, 1.0]]), normalize=True)
    scale = math.sqrt(2 / 3) + 1e-4
    assert found.tolist() == pytest.approx([1 / scale, -1 / scale, 0.0, 0.0, 0.0])
