"""Critic losses, ROVER, mirror descent, off-policy rows and CAPO: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss import curvature
from posttrain.loss.curvature import adam_direction, capo, filter_tokens
from posttrain.loss.hybrid import rl_plus
from posttrain.loss.proximal import mdpo, mdpo_sequence, step_size
from posttrain.loss.rover import rover
from posttrain.loss.value import clipped_value_loss, soft_minimum, value

F64 = torch.float64


def batch(mask: list[list[int]], **fields: Any) -> RolloutBatch:
    tensors = {name: torch.tensor(x, dtype=F64) if isinstance(x, list) else x for name, x in fields.items()}
    return RolloutBatch(torch.zeros(len(mask), dtype=torch.long), torch.tensor(mask, dtype=torch.bool), **tensors)


def test_value_loss_takes_the_larger_error_and_its_gradient() -> None:
    """R = 1, v_old = 0, clip 0.2. v = 0.5 -> clipped 0.2: errors 0.25 and 0.64, half of the larger 0.32, no gradient.
    v = -0.5 -> -0.2: 2.25 and 1.44: 1.125, gradient v - R = -1.5. Padding 0."""
    new = torch.tensor([[0.5, -0.5, 9.0]], dtype=F64, requires_grad=True)
    rows = batch([[1, 1, 0]], values=[[0.0, 0.0, 5.0]], returns=[[1.0, 1.0, 7.0]], new_values=new)
    found = value(rows, torch.zeros(1, 3, dtype=F64), clip=0.2)
    found.values.sum().backward()
    assert found.values[0].tolist() == pytest.approx([0.32, 1.125, 0.0])
    assert new.grad[0].tolist() == pytest.approx([0.0, -1.5, 0.0])


def test_huber_loss_and_mean_of_clipped_and_unclipped_error() -> None:
    """v = 2, R = 0, v_old = 0, clip 0.2: Huber 0.5 of 2 is 0.5 * 1.75 = 0.875, of 0.2 is 0.02; their mean 0.4475."""
    new, zero = torch.tensor([2.0], dtype=F64), torch.tensor([0.0], dtype=F64)
    assert clipped_value_loss(new, zero, zero, clip=0.2, reduce="mean", huber=0.5).item() == pytest.approx(0.4475)


def test_the_soft_minimum_is_pessimistic() -> None:
    first, second = torch.tensor([1.0, 0.5], dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)
    found = soft_minimum(first, second)
    assert found[0].item() == pytest.approx(1.0)
    assert 0.5 <= found[1].item() <= 0.5 + 0.3 * math.log(2)


def test_rover_targets_value_and_gradient() -> None:
    """A = 1, q = (0.1, 0); m - m_old = (9, 0.3): y = (1 + 0.3, 1): values 1.2^2 and 1; gradient 2 (q - y) = -2.4,
    -2."""
    logp = torch.tensor([[-0.9, -1.0, 4.0]], dtype=F64, requires_grad=True)
    rows = batch(
        [[1, 1, 0]],
        old_logp=[[-1.0, -1.0, 8.0]],
        advantages=[1.0],
        vocab_mean_logp=[[0.0, -2.7, 5.0]],
        old_vocab_mean_logp=[[-9.0, -3.0, 1.0]],
    )
    found = rover(rows, logp)
    found.values.sum().backward()
    assert found.values[0].tolist() == pytest.approx([1.44, 1.0, 0.0])
    assert logp.grad[0].tolist() == pytest.approx([-2.4, -2.0, 0.0])


def test_mirror_descent_step_shrinks_over_training() -> None:
    """Step 5 of 10: t = 0.5. r = 2, A = 1: -2 + (2 ln 2 - 1) / 0.5, gradient -2 + 2 ln 2 / 0.5."""
    logp = torch.tensor([[math.log(2) - 1]], dtype=F64, requires_grad=True)
    rows = batch([[1]], old_logp=[[-1.0]], advantages=[1.0], step=5, total_steps=10)
    found = mdpo(rows, logp)
    found.values.sum().backward()
    assert found.values.item() == pytest.approx(-2 + 2 * (2 * math.log(2) - 1))
    assert logp.grad.item() == pytest.approx(-2 + 4 * math.log(2))
    assert [step_size(k, 10) for k in (1, 6, 11, 50)] == pytest.approx([1.0, 0.5, 1e-3, 1e-3])


def test_sequence_mirror_descent_fits_the_log_ratio() -> None:
    """A = 0.5, tau 0.1: at S = 0 value 0.25 / 0.2, gradient -A by each token (mean over rows of 1); minimum at S =
    5."""
    rows = batch([[1, 1]], old_logp=[[-1.0, -1.0]], advantages=[0.5])
    logp = torch.tensor([[-1.0, -1.0]], dtype=F64, requires_grad=True)
    found = mdpo_sequence(rows, logp)
    found.values.mean().backward()
    assert found.values[0].tolist() == pytest.approx([1.25, 1.25])
    assert logp.grad[0].tolist() == pytest.approx([-0.5, -0.5])
    assert mdpo_sequence(rows, torch.tensor([[1.5, 1.5]], dtype=F64)).values.sum().item() == pytest.approx(0.0)


def test_external_tokens_are_weighted_by_the_mixture_ratio_and_by_focus() -> None:
    """p = p_old = 0.25: 2 * 0.25 / (0.25 + 0.625) = 4/7; focus sqrt(0.75); value and gradient -A * both. Own tokens -A
    r."""
    logp = torch.tensor([[math.log(0.25), -1.0]], dtype=F64, requires_grad=True)
    rows = batch([[1, 1]], old_logp=[[math.log(0.25), -1.0]], advantages=[2.0], external=torch.tensor([[True, False]]))
    found = rl_plus(rows, logp)
    found.values.sum().backward()
    expected = [-2 * math.sqrt(0.75) * 4 / 7, -2.0]
    assert found.values[0].tolist() == pytest.approx(expected)
    assert logp.grad[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("logp", [0.0, 1e-7])
def test_certain_external_token_has_zero_focus(logp: float) -> None:
    leaf = torch.tensor([[logp]], dtype=F64, requires_grad=True)
    rows = batch([[1]], old_logp=[[-0.1]], advantages=[1.0], external=torch.tensor([[True]]))
    found = rl_plus(rows, leaf)
    found.values.sum().backward()
    assert (found.values.item(), leaf.grad.item()) == (0.0, 0.0)


def test_capo_step_fisher_and_hessian_terms() -> None:
    """probs (1/2, 1/2), first token chosen: e = (1/2, -1/2), |e|^2 = 1/2; h = 2, A = 1, lr = 0.1: u = 4 e, e.u = 2:
    fisher 0.01 * 4 / 2 = 0.02. <g, D> = |e|^2 |h|^2 = 2; sum p u^2 - (sum p u)^2 = 4 - 0: hessian 0.1 * 2 + 0.01 / 2 *
    (4 - 4) = 0.2."""
    args = (
        torch.tensor([[[0.5, 0.5]]], dtype=F64),
        torch.tensor([[[1, 0]]]),
        torch.tensor([[[2.0]]], dtype=F64),
        torch.tensor([1.0], dtype=F64),
        torch.tensor([[True]]),
    )
    found = filter_tokens(*args, learning_rate=0.1, tau_fisher=0.03, tau_hessian=0.3)
    assert (found.fisher.item(), found.hessian.item(), found.keep.item()) == pytest.approx((0.02, 0.2, True))
    assert not filter_tokens(*args, learning_rate=0.1, tau_fisher=0.02, tau_hessian=0.3).keep.item()
    assert not filter_tokens(*args, learning_rate=0.1, tau_fisher=0.03, tau_hessian=0.2).keep.item()


def test_adam_first_step_is_the_sign_of_the_gradient() -> None:
    gradient = torch.tensor([3.0, -0.2], dtype=F64)
    found = adam_direction(gradient, m=torch.zeros(2, dtype=F64), v=torch.zeros(2, dtype=F64), step=1)
    assert found.tolist() == pytest.approx([1.0, -1.0], rel=1e-6)


def test_capo_drops_tokens_from_the_denominators_but_not_zero_advantages() -> None:
    topk = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]]], dtype=F64).log()
    rows = batch(
        [[1, 1, 0]],
        topk_logp=topk,
        topk_chosen=torch.tensor([[[True, False]] * 3]),
        hidden=torch.full((1, 3, 1), 2.0, dtype=F64),
        advantages=[[1.0, 0.0, 5.0]],
    )
    found = capo(rows, learning_rate=0.1, tau_fisher=0.01, tau_hessian=1.0)
    assert found.denominator == "kept"
    assert found.mask.tolist() == [[False, True, False]]
    assert capo(rows, learning_rate=1e-9).mask.tolist() == [[True, True, False]]


def test_capo_result_does_not_depend_on_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(5, 4, 3, generator=generator, dtype=F64).log_softmax(-1)
    rows = batch(
        [[1, 1, 1, 0]] * 5,
        topk_logp=logp,
        topk_chosen=torch.zeros(5, 4, 3, dtype=torch.bool).index_fill(-1, torch.tensor([0]), True),
        hidden=torch.randn(5, 4, 2, generator=generator, dtype=F64),
        advantages=[1.0, -1.0, 0.5, 2.0, -0.1],
    )
    settings = {"learning_rate": 0.1, "tau_fisher": 0.01, "tau_hessian": 0.1}
    whole = capo(rows, **settings).mask
    assert whole.any() and not whole[:, :3].all()
    monkeypatch.setattr(curvature, "CELLS", 8)
    assert torch.equal(capo(rows, **settings).mask, whole)
