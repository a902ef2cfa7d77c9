"""CISPO (clamped importance weights without gradient) and REINFORCE: hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.reinforce import cispo, reinforce, vespo

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)


def batch() -> tuple[RolloutBatch, torch.Tensor]:
    """Return log-probs -1 with ratios (2, 6, 0.5) at A = 1 and (2, 0.1) at A = -3; masked cells hold garbage."""
    logp = torch.where(MASK, -1.0, 50.0).double().requires_grad_()
    ratios = torch.tensor([[2.0, 6.0, 0.5], [2.0, 0.1, 1.0]], dtype=torch.float64)
    old = torch.where(MASK, -1.0 - ratios.log(), -9.0)
    advantages = torch.tensor([1.0, -3.0], dtype=torch.float64)
    return RolloutBatch(torch.zeros(2, dtype=torch.long), MASK, old_logp=old, advantages=advantages), logp


def test_cispo_clamps_the_weight_and_keeps_every_gradient() -> None:
    """Weights min(r, 5) = (2, 5, 0.5), (2, 0.1); value -w A logp = w A here, gradient -w A."""
    rows, logp = batch()
    found = cispo(rows, logp)
    found.values.sum().backward()
    expected = torch.tensor([[2.0, 5.0, 0.5], [-6.0, -0.3, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found.values.detach(), expected)
    torch.testing.assert_close(logp.grad, -expected)
    torch.testing.assert_close(found.stats["weights"][1], torch.tensor([2.0, 0.1, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("bounds", "weights"),
    [((0.8, 1.2), [1.2, 1.2, 0.8]), ((None, None), [2.0, 6.0, 0.5]), ((1.0, None), [2.0, 6.0, 1.0])],
)
def test_cispo_bounds_are_values_of_the_ratio(bounds: tuple, weights: list[float]) -> None:
    rows, logp = batch()
    found = cispo(rows, logp, ratio_min=bounds[0], ratio_max=bounds[1])
    assert found.stats["weights"][0].tolist() == pytest.approx(weights)


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    rows, logp = batch()
    found = reinforce(rows, logp)
    found.values.sum().backward()
    assert found.values.tolist() == [[1.0, 1.0, 1.0], [-3.0, -3.0, 0.0]]
    assert logp.grad.tolist() == [[-1.0, -1.0, -1.0], [3.0, 3.0, 0.0]]


def test_vespo_weighs_rows_by_the_product_of_their_ratios() -> None:
    """Row 1 (A = 1): w = 2 * 6 / 2 = 6, weight 6^2 exp(3 (1 - 6)). Row 2 (A = -3): 2 * 0.1 = 0.2, 0.2^3 exp(2 * 0.8).
    Times -A logp with logp = -1; the gradient does not pass through the weight."""
    rows, logp = batch()
    found = vespo(rows, logp)
    found.values.sum().backward()
    first, second = 36 * math.exp(-15), 0.008 * math.exp(1.6)
    assert found.stats["seq_ratio"].tolist() == pytest.approx([6.0, 0.2])
    assert found.values[0].tolist() == pytest.approx([first] * 3)
    assert logp.grad[1].tolist() == pytest.approx([3 * second, 3 * second, 0.0])
