"""DRPO: hand-computed length weights, and the gradient never lowers the probability of a right answer."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.channels import channel_clip
from posttrain.loss.drpo import drpo, drpo_weights

F64 = torch.float64


def rows(correct: list[float], lengths: list[int], ids: list[int] | None = None) -> RolloutBatch:
    return RolloutBatch(
        group_ids=torch.tensor(ids or [0] * len(correct)),
        mask=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
        correct=torch.tensor(correct, dtype=F64),
    )


def test_weights_decay_with_length_by_lam_times_max_length() -> None:
    """n = 2 and 4 of 4, lam 1/2: exponents 1 and 0, weights e / (e + 1) and 1 / (e + 1). max_length enters only through
    lam * max_length."""
    batch = rows([1, 1, 0], [2, 4, 1])
    e = math.e
    assert drpo_weights(batch, lam=0.5).tolist() == pytest.approx([e / (e + 1), 1 / (e + 1), 0])
    assert drpo_weights(batch, lam=0.25, max_length=8).tolist() == pytest.approx([e / (e + 1), 1 / (e + 1), 0])


def test_uniform_groups_have_zero_weights() -> None:
    """Groups: all right, all wrong, and one right row beside an empty row, which counts as neither."""
    batch = rows([1, 1, 0, 0, 1, 0], [2, 4, 1, 3, 2, 0], [0, 0, 1, 1, 2, 2])
    assert drpo_weights(batch, lam=0.5).tolist() == [0.0] * 6


def test_tiny_lam_keeps_the_shortest_and_large_lam_weights_equally() -> None:
    batch = rows([1, 1, 0], [2, 4, 1])
    assert drpo_weights(batch, lam=1e-6).tolist() == pytest.approx([1, 0, 0])
    assert drpo_weights(batch, lam=1e9).tolist() == pytest.approx([0.5, 0.5, 0])


def test_on_policy_loss_and_gradient() -> None:
    """One right row of 2 tokens, one wrong row of 1: J = s_right - s_wrong; K = 0, so no penalty."""
    batch = rows([1, 0], [2, 1])
    logp = torch.tensor([[-1.0, -3.0], [-5.0, 99.0]], dtype=F64, requires_grad=True)
    found = drpo(batch, logp)
    assert found.values.tolist() == pytest.approx([2.0 - 5.0])
    (gradient,) = torch.autograd.grad(found.values.sum(), logp)
    assert gradient.tolist() == [[-0.5, -0.5], [1.0, 0.0]]


def test_trust_region_penalty_beyond_kl_delta() -> None:
    """Uniform groups have only the penalty. K = mean(old - logp) = 1/2; beta 2, delta 1/4: 2 * 1/4 * 1/2 = 1/4, and the
    gradient is beta [K - delta] * -1/2 a token."""
    batch = rows([1, 1], [1, 1]).replace(old_logp=torch.tensor([[-1.0], [-1.0]], dtype=F64))
    logp = torch.tensor([[-1.5], [-1.5]], dtype=F64, requires_grad=True)
    found = drpo(batch, logp, kl_beta=2.0, kl_delta=0.25)
    assert found.values.tolist() == pytest.approx([0.25])
    (gradient,) = torch.autograd.grad(found.values.sum(), logp)
    assert gradient.flatten().tolist() == pytest.approx([-0.25, -0.25])


def test_right_rows_gain_probability_and_shorter_ones_gain_more() -> None:
    torch.manual_seed(0)
    batch = rows([1, 1, 0, 0, float("nan"), 1], [2, 4, 3, 1, 2, 0])
    logp = (-torch.rand(6, 4, dtype=F64)).requires_grad_()
    (gradient,) = torch.autograd.grad(drpo(batch, logp, lam=5.0).values.sum(), logp)
    assert bool((gradient[:2][batch.mask[:2]] < 0).all())
    assert float(gradient[0].sum()) < float(gradient[1].sum())
    assert not gradient[4:].any()


def test_channel_clip_averages_over_the_channels_rows() -> None:
    """Row 0 alone has an advantage in channel 1: - A a token at ratio 1, and its two tokens are counted."""
    batch = rows([1, 1], [2, 2]).replace(channels={"1": torch.tensor([0.5, 0.0], dtype=F64)})
    logp = torch.full((2, 2), -1.0, dtype=F64)
    found = channel_clip(batch, logp)
    assert found.values.tolist() == [[-0.5, -0.5], [0.0, 0.0]]
    assert found.counted is not None and found.counted.tolist() == [[True, True], [False, False]]
