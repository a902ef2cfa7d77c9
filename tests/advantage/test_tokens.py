"""Returns, generalized advantage estimation and whitening: hand-computed values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.advantage.tokens import (
    baseline_terms,
    gae_terms,
    mark_last_trained,
    reinforce_pp,
    returns_to_go,
    reverse_scan,
    token_rewards,
    whiten_values,
)
from posttrain.batch import RolloutBatch


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def batch(mask: list[list[int]], rewards: list[float], **fields: Any) -> RolloutBatch:
    return RolloutBatch(
        group_ids=torch.zeros(len(mask), dtype=torch.long),
        mask=torch.tensor(mask).bool(),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        **fields,
    )


def test_reward_is_placed_at_the_last_trained_token() -> None:
    """After a tool's output, never after padding; an empty or unscored row has none."""
    rows = batch([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]], [2.0, 5.0, float("nan")])
    assert mark_last_trained(rows.mask).nonzero().tolist() == [[0, 2], [2, 1]]
    assert token_rewards(rows).tolist() == [[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_returns_discount_tool_output_or_skip_it() -> None:
    """Reward 1 at the third position, gamma 1/2, the second token a tool's: 1/4 if it is discounted, 1/2 if it is
    skipped."""
    rewards, mask = matrix([[0, 9, 1]]), torch.tensor([[True, False, True]])
    assert returns_to_go(rewards, mask, 0.5).tolist() == [[0.25, 0, 1]]
    assert returns_to_go(rewards, mask, 0.5, skip_masked=True).tolist() == [[0.5, 0, 1]]


@pytest.mark.parametrize("width", [0, 1, 2, 7, 64, 101])
def test_reverse_scan_equals_a_loop(width: int) -> None:
    """x[t] = values[t] + decay[t] * x[t + 1], position by position; the inputs are not modified."""
    generator = torch.Generator().manual_seed(width)
    values, kept = (torch.rand(3, width, generator=generator, dtype=torch.float64) for _ in range(2))
    kept[0] = 0.0  # no value leaks from the end
    before = values.clone(), kept.clone()
    running, expected = torch.zeros(3, dtype=torch.float64), torch.zeros_like(values)
    for t in reversed(range(width)):
        running = values[:, t] + kept[:, t] * running
        expected[:, t] = running
    torch.testing.assert_close(reverse_scan(values, kept), expected, rtol=1e-14, atol=0)
    assert torch.equal(values, before[0]) and torch.equal(kept, before[1])


def test_whitening_with_population_or_unbiased_variance() -> None:
    """Values 1 and 3: mean 2; population variance 1, unbiased 2."""
    values, mask = matrix([[1, 3, 100]]), torch.tensor([[True, True, False]])
    assert whiten_values(values, mask, whitening="openrlhf").tolist() == [[-1, 1, 0]]
    assert whiten_values(values, mask, whitening="verl")[0].tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5, 0], rel=1e-8
    )
    assert whiten_values(values, mask, whitening="verl", scale=False).tolist() == [[-1, 1, 0]]


@pytest.mark.parametrize("whitening", ["openrlhf", "verl"])
def test_whitening_equal_values_or_one_value_gives_exactly_zero(whitening: Any) -> None:
    """The mean of three 0.1 is not 0.1 in floating point."""
    values = torch.full((1, 3), 0.1, dtype=torch.float64)
    for mask in ([[1, 1, 1]], [[0, 1, 0]], [[0, 0, 0]]):
        assert not whiten_values(values, torch.tensor(mask).bool(), whitening=whitening).any()


def test_reinforce_pp_mean_is_over_tokens() -> None:
    """Returns 1 1 1 and 0: mean 3/4, population std sqrt(3)/4: 1/sqrt(3) and -sqrt(3)."""
    found = reinforce_pp(batch([[1, 1, 1], [1, 0, 0]], [1.0, 0.0]))
    third = 3**-0.5
    torch.testing.assert_close(found, matrix([[third, third, third], [-(3**0.5), 0, 0]]))


def test_reinforce_pp_baseline_group_mean_is_over_rows_and_batch_mean_over_tokens() -> None:
    """Rewards 1, 0: centered 1/2, -1/2. Tokens: three times 1/2, one -1/2: mean 1/4, std sqrt(3)/4."""
    found = baseline_terms(batch([[1, 1, 1], [1, 0, 0]], [1.0, 0.0]))
    assert found.centered.tolist() == [0.5, -0.5]
    torch.testing.assert_close(found.advantages[:, 0], matrix([[3**-0.5, -(3**0.5)]])[0])


def test_reinforce_pp_baseline_batch_mean_is_subtracted_without_scaling_too() -> None:
    """Three tokens of 1/2 and one of -1/2: minus their mean 1/4 they are 1/4 and -3/4."""
    for whitening in ("openrlhf", "verl"):
        rows = batch([[1, 1, 1], [1, 0, 0]], [1.0, 0.0])
        found = baseline_terms(rows, std_norm=False, whitening=whitening)  # type: ignore[arg-type]
        torch.testing.assert_close(found.advantages, matrix([[0.25, 0.25, 0.25], [-0.75, 0, 0]]))


def test_gae_with_lambda_and_gamma_one_is_return_minus_value() -> None:
    rows = batch([[1, 1, 1]], [2.0], values=matrix([[0.5, 1.0, -1.0]]))
    found = gae_terms(rows, gamma=1.0, lam=1.0, whiten=False)
    assert found.raw.tolist() == [[1.5, 1.0, 3.0]]
    assert found.returns.tolist() == [[2.0, 2.0, 2.0]]


def test_gae_with_discounts() -> None:
    """gamma 1/2, lam 1/2, values 1, 2, reward 4 at the end: A_1 = 4 - 2 = 2; delta_0 = 0 + 1 - 1 = 0, A_0 = 2 / 4."""
    rows = batch([[1, 1]], [4.0], values=matrix([[1.0, 2.0]]))
    assert gae_terms(rows, gamma=0.5, lam=0.5, whiten=False).raw.tolist() == [[0.5, 2.0]]


def test_gae_skips_tool_output() -> None:
    plain = batch([[1, 1]], [4.0], values=matrix([[1.0, 2.0]]))
    tool = batch([[1, 0, 0, 1]], [4.0], values=matrix([[1.0, 7.0, -7.0, 2.0]]))
    plain_terms, tool_terms = gae_terms(plain, gamma=0.5, lam=0.5), gae_terms(tool, gamma=0.5, lam=0.5)
    for name in ("advantages", "raw", "returns"):
        assert getattr(tool_terms, name)[:, [0, 3]].tolist() == getattr(plain_terms, name).tolist()
        assert not getattr(tool_terms, name)[:, 1:3].any()


def test_token_rewards_of_the_batch_take_precedence() -> None:
    rows = batch([[1, 1]], [4.0], token_rewards=matrix([[1.0, -1.0]]))
    assert token_rewards(rows).tolist() == [[1.0, -1.0]]
