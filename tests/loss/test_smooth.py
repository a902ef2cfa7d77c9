"""Losses with smooth bounds on the ratio: hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.smooth import fiberpo, mhpo, sapo


def batch(log_ratios: list[list[float]], mask: list[list[int]], advantages: list[float]) -> tuple:
    old = torch.full((len(mask), len(mask[0])), -1.0, dtype=torch.float64)
    logp = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    rows = RolloutBatch(
        group_ids=torch.zeros(len(mask), dtype=torch.long),
        mask=torch.tensor(mask, dtype=torch.bool),
        old_logp=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )
    return rows, logp


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_mhpo_on_policy_gradient_is_scaled_by_the_hazard_at_zero() -> None:
    """zeta(0) = (ln 2)^1.5 + (ln 2 / 0.8)^2 = 0.5771 + 0.7507; exp(-1.3278) = 0.2651; gradient -A * 0.2651."""
    rows, logp = batch([[0.0]], [[1]], [2.0])
    found = mhpo(rows, logp)
    found.values.sum().backward()
    factor = math.exp(-(math.log(2) ** 1.5) - (math.log(2) / 0.8) ** 2)
    assert factor == pytest.approx(0.2651, abs=1e-4)
    assert (found.values.item(), logp.grad.item()) == pytest.approx((-2 * factor, -2 * factor))
    normalised = mhpo(rows, logp, normalize_hazard=True)
    assert normalised.values.item() == pytest.approx(-2.0)


def test_mhpo_value_and_gradient_off_policy() -> None:
    """log-ratio 0.9, c = 1.5: psi = 1.5 tanh(0.6); gradient has the slope 1 - tanh^2(0.6), and none through zeta."""
    rows, logp = batch([[0.9]], [[1]], [-1.0])
    found = mhpo(rows, logp)
    found.values.sum().backward()
    psi = 1.5 * math.tanh(0.6)
    zeta = softplus(psi) ** 1.5 + (softplus(-psi) / 0.8) ** 2
    assert found.values.item() == pytest.approx(math.exp(psi - zeta))
    assert logp.grad.item() == pytest.approx(math.exp(psi - zeta) * (1 - math.tanh(0.6) ** 2))


def test_fiberpo_on_policy_equals_the_policy_gradient() -> None:
    """At d = 0 every token is rising: the base moves by 1/n, each token's residual by 1 - 1/n and the other residuals
    by -1/n, so a token's total weight is n * 1/n + 1 - n * 1/n = 1: the gradient of the row's sum is -A."""
    rows, logp = batch([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[1, 1, 1], [1, 0, 0]], [2.0, -1.0])
    found = fiberpo(rows, logp)
    found.values.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-2.0, -2, -2], [1.0, 0, 0]], dtype=torch.float64))


def test_fiberpo_value_off_policy() -> None:
    """d = (0.06, 0.02, -0.02), n = 3: s+ = 0.08/3, s- = 0.02/3, both below their limits: base = 0.02.
    epsilon 0.03. Token 1: clip(0.06 - 0.02667) = 0.03, minus clip(-s-) = -0.00667: 0.03667. Token 2: 0.02 - 0.02667 +
    0.00667 = 0. Token 3: clip(-0.02 + 0.00667) - clip(s+ = 0.02667) = -0.04."""
    rows, logp = batch([[0.06, 0.02, -0.02]], [[1, 1, 1]], [1.0])
    found = fiberpo(rows, logp)
    assert found.stats["base_log_weight"].item() == pytest.approx(0.02)
    expected = [math.exp(x) for x in (0.02 + 0.03 + 0.02 / 3, 0.02, -0.02)]
    assert found.stats["gated_ratio"][0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("drift", "base"), [(0.1, 0.1), (0.12, 0.12), (0.14, 0.08), (0.18, 0.0), (0.5, 0.0)])
def test_fiberpo_ramps_down_rows_beyond_the_drift_limit(drift: float, base: float) -> None:
    """n = 2, c_pos 0.12, both tokens at `drift`: above 0.12 the ramp is 3 * 0.12 - 2 * drift, above 0.18 it is 0."""
    rows, logp = batch([[drift, drift]], [[1, 1]], [1.0])
    assert fiberpo(rows, logp).stats["base_log_weight"].item() == pytest.approx(base)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_value_and_gradient(advantage: float, tau: float) -> None:
    """On-policy: -A (4 / tau) / 2, gradient -A. At r = 2: p = sigmoid(tau), gradient -A 4 p (1 - p) 2."""
    rows, logp = batch([[0.0, math.log(2)]], [[1, 1]], [advantage])
    found = sapo(rows, logp)
    found.values.sum().backward()
    p = 1 / (1 + math.exp(-tau))
    assert found.values.tolist()[0] == pytest.approx([-2 * advantage / tau, -4 * advantage * p / tau])
    assert logp.grad.tolist()[0] == pytest.approx([-advantage, -8 * advantage * p * (1 - p)])
    assert found.stats["gate"].tolist()[0] == pytest.approx([1.0, 4 * p * (1 - p)])
