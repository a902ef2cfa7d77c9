"""Decoupled PPO (current, proximal and behaviour policy): hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.clip import clip
from posttrain.loss.decoupled import decoupled_ppo, ewma_step, ppo_ewma, remix


def batch(pi: list[float], old: list[float], mu: list[float], advantage: float) -> tuple[RolloutBatch, torch.Tensor]:
    """Return one row of tokens with these probabilities under the three policies."""
    log = [torch.tensor([x], dtype=torch.float64).log() for x in (pi, old, mu)]
    rows = RolloutBatch(
        group_ids=torch.zeros(1, dtype=torch.long),
        mask=torch.ones(1, len(pi), dtype=torch.bool),
        old_logp=log[1],
        rollout_logp=log[2],
        advantages=torch.tensor([advantage], dtype=torch.float64),
    )
    return rows, log[0].requires_grad_()


def test_decoupled_clips_around_the_proximal_policy_and_weights_by_the_behaviour_ratio() -> None:
    """A = 1. Token 1: pi/old = 0.3/0.2 = 1.5 -> clipped 1.2, times old/mu = 2: -min(1.5, 1.2) * 2 = -2.4, cut.
    Token 2: pi/old = 1.1 within: -1.1 * old/mu 0.5 = -0.55, gradient the same."""
    rows, logp = batch([0.3, 0.22], [0.2, 0.2], [0.1, 0.4], 1.0)
    found = decoupled_ppo(rows, logp)
    found.values.sum().backward()
    assert found.values.tolist()[0] == pytest.approx([-2.4, -0.55])
    assert logp.grad.tolist()[0] == pytest.approx([0.0, -0.55])


def test_decoupled_caps_the_ratio_to_the_behaviour_policy() -> None:
    """pi/mu = 400 with cap 100: b' = pi / 100, so the value is -100 and its gradient -100."""
    rows, logp = batch([0.4], [0.4], [0.001], 1.0)
    found = decoupled_ppo(rows, logp)
    found.values.sum().backward()
    assert (found.values.item(), logp.grad.item()) == pytest.approx((-100.0, -100.0))


@pytest.mark.parametrize("loss", [decoupled_ppo, remix])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_decoupled_and_remix_equal_ppo_if_behaviour_is_the_old_policy(loss, advantage: float) -> None:
    args = ([0.3, 0.1, 0.21], [0.2, 0.2, 0.2], [0.2, 0.2, 0.2], advantage)
    (rows, logp), (_, other) = batch(*args), batch(*args)
    found, ppo = loss(rows, logp), clip(rows, other)
    found.values.sum().backward()
    ppo.values.sum().backward()
    torch.testing.assert_close(found.values, ppo.values)
    torch.testing.assert_close(logp.grad, other.grad)


def test_remix_clips_around_the_ratio_at_the_start_of_the_update() -> None:
    """mu = 0.1, old = 0.2: c = 2, clip to [1.8, 2.2]. pi = 0.25: r = 2.5, A = 1 -> -2.2, cut. pi = 0.15: r = 1.5: A = 1
    takes -1.5 with its gradient."""
    rows, logp = batch([0.25, 0.15], [0.2, 0.2], [0.1, 0.1], 1.0)
    found = remix(rows, logp)
    found.values.sum().backward()
    assert found.values.tolist()[0] == pytest.approx([-2.2, -1.5])
    assert logp.grad.tolist()[0] == pytest.approx([0.0, -1.5])
    assert found.stats["clip_ratio/region_mean"].tolist() == [[1.0, 0.0]]


def test_tokens_without_rollout_logp_count_as_sampled_by_the_old_policy() -> None:
    rows, logp = batch([0.22], [0.2], [0.1], 1.0)
    rows = rows.replace(rollout_logp=torch.tensor([[math.nan]], dtype=torch.float64))
    assert decoupled_ppo(rows, logp).values.item() == pytest.approx(-1.1)


def averages(values: list[float], decay: float) -> list[float]:
    """Return the moving average after each update; the first value initializes it."""
    average, weight, found = values[0], 1.0, []
    for current in values[1:]:
        average, weight = ewma_step(average, weight, current, decay)
        found.append(average)
    return found


def test_ewma_is_bias_corrected() -> None:
    """d = 0.5: W = 1, 1.5, 1.75. 2 -> (0.5 / 1.5) 2 + 4 / 1.5 = 10/3; then (0.75 / 1.75) 10/3 + 8 / 1.75 = 6."""
    assert averages([2.0, 4.0, 8.0], 0.5) == pytest.approx([10 / 3, 6.0])
    assert averages([2.0, 4.0, 8.0], 0.0) == pytest.approx([4.0, 8.0])
    assert averages([3.0] * 4, 0.9) == pytest.approx([3.0] * 3)


def test_ewma_policy_replaces_the_old_policy() -> None:
    """The loss clips around the averaged policy, and tokens without an engine log-prob count as sampled by the old
    policy."""
    rows, logp = batch([0.22, 0.22], [0.2, 0.2], [0.1, 0.1], 1.0)
    rows = rows.replace(prox_logp=torch.tensor([[math.log(0.1), math.log(0.22)]], dtype=torch.float64))
    around = rows.replace(old_logp=rows.prox_logp)
    assert torch.equal(ppo_ewma(rows, logp).values, decoupled_ppo(around, logp).values)
    unknown = rows.replace(rollout_logp=torch.full((1, 2), math.nan, dtype=torch.float64))
    known = around.replace(rollout_logp=rows.old_logp)
    assert torch.equal(ppo_ewma(unknown, logp).values, decoupled_ppo(known, logp).values)
    with pytest.raises(ValueError, match="prox_logp"):
        ppo_ewma(rows.replace(prox_logp=None), logp)
