"""KL estimators: values and gradients at d = ln 2, guards, and the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.control.adaptive import adaptive_coef
from posttrain.errors import NonFiniteError
from posttrain.loss import kl
from posttrain.loss.distill import sampled_distill

LN2 = math.log(2)
ESTIMATORS = [kl.k1, kl.k2, kl.k3, kl.absolute, kl.k3_straight_through, kl.k3_is, kl.k1_straight_through]


def batch(d: list[float], ratio: float = 1.0) -> tuple[RolloutBatch, torch.Tensor]:
    """Return one row with logp = -1, ref_logp = -1 - d and old_logp = -1 - ln(ratio)."""
    logp = torch.full((1, len(d)), -1.0, dtype=torch.float64, requires_grad=True)
    rows = RolloutBatch(
        group_ids=torch.zeros(1, dtype=torch.long),
        mask=torch.ones(1, len(d), dtype=torch.bool),
        ref_logp=logp.detach() - torch.tensor([d], dtype=torch.float64),
        old_logp=logp.detach() - math.log(ratio),
    )
    return rows, logp


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        (kl.k1, LN2, 1.0),
        (kl.k2, LN2**2 / 2, LN2),
        (kl.k3, LN2 - 0.5, 0.5),
        (kl.absolute, LN2, 1.0),
        (kl.k3_straight_through, LN2 - 0.5, LN2),
        (kl.k1_straight_through, LN2, LN2),
        (kl.k3_is, 3 * (LN2 - 0.5), 3 * LN2),
    ],
)
def test_value_and_gradient(estimator: object, value: float, gradient: float) -> None:
    """d = ln 2: exp(-d) = 1/2, so k3 = 1/2 + ln 2 - 1 with gradient 1 - 1/2. k3_is at r = 3: 3 k3, gradient r d."""
    rows, logp = batch([LN2], ratio=3.0)
    values = estimator(rows, logp).values  # type: ignore[operator]
    values.sum().backward()
    assert values.item() == pytest.approx(value, rel=1e-12)
    assert logp.grad.item() == pytest.approx(gradient, rel=1e-12)


def test_k1_straight_through_gradient_equals_sampled_distill() -> None:
    """Its gradient is that of `sampled_distill`, which is a mean over the 5 tokens; |d| is limited to 20."""
    rows, logp = batch([0.3, -2.0, 0.0, 50.0, -50.0])
    kl.k1_straight_through(rows, logp).values.sum().backward()
    ours, theirs = logp.grad / 5, logp.detach().requires_grad_()
    sampled_distill(theirs, rows.ref_logp, rows.mask).loss.backward()
    torch.testing.assert_close(ours, theirs.grad)
    assert logp.grad.tolist()[0][3:] == [20.0, -20.0]


def test_gradient_of_abs_is_the_sign() -> None:
    rows, logp = batch([-0.3, 0.0, 0.3])
    kl.absolute(rows, logp).values.sum().backward()
    assert logp.grad.tolist() == [[-1.0, 0.0, 1.0]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_zero_kl(estimator: object) -> None:
    rows, logp = batch([0.0, 0.0])
    assert estimator(rows, logp).values.tolist() == [[0.0, 0.0]]  # type: ignore[operator]


def test_k3_is_never_negative() -> None:
    rows, logp = batch(torch.linspace(-25, 25, 201, dtype=torch.float64).tolist())
    assert float(kl.k3(rows, logp).values.detach().min()) >= 0.0


@pytest.mark.parametrize("estimator", [kl.k3, kl.k3_straight_through, kl.k3_is])
def test_k3_is_clamped_and_clamped_tokens_are_counted(estimator: object) -> None:
    """d = -100 would give e^100: the value is clamped at 10. d = 1 is far from the limit."""
    rows, logp = batch([-100.0, 1.0])
    found = estimator(rows, logp)  # type: ignore[operator]
    assert found.values[0, 0].item() == pytest.approx(10.0)
    assert found.stats["kl/clamped"].tolist() == [[1.0, 0.0]]
    kl.k3(rows, logp).values.sum().backward()
    assert logp.grad[0, 0].item() == pytest.approx(-12.610868638), "that at the limit: the token is pulled back"
    assert logp.grad[0, 1].item() == pytest.approx(1 - math.exp(-1))


def test_missing_or_nan_ref_logp_raises() -> None:
    rows, logp = batch([0.5, float("nan")])
    with pytest.raises(NonFiniteError, match="ref_logp is NaN"):
        kl.k3(rows, logp)
    with pytest.raises(ValueError, match="no ref_logp"):
        kl.k3(rows.replace(ref_logp=None), logp)
    hidden = rows.replace(mask=torch.tensor([[True, False]]))
    assert kl.k3(hidden, logp).values[0, 1].item() == 0.0


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(0.1, 0.04), (0.2, 0.04 * 1.02), (0.11, 0.04 * 1.01), (0.0, 0.04 * 0.98), (5.0, 0.04 * 1.02)],
)
def test_adaptive_coefficient_follows_the_kl_target(measured: float, expected: float) -> None:
    """Target 0.1, 100 samples of a horizon of 1000: factor 1 + clip(kl / 0.1 - 1, -0.2, 0.2) / 10."""
    found = adaptive_coef(0.04, measured, target=0.1, horizon=1000, n_steps=100)
    assert found == pytest.approx(expected, rel=1e-12)


def test_adaptive_coefficient_keeps_its_sign_in_steps_larger_than_the_horizon() -> None:
    """1000 rows and horizon 100: -0.2 * 10 would turn 0.04 into -0.04, a reward for KL; the step is 20% at most."""
    assert adaptive_coef(0.04, 0.0, target=0.1, horizon=100, n_steps=1000) == pytest.approx(0.032)
    assert adaptive_coef(0.04, 1.0, target=0.1, horizon=100, n_steps=1000) == pytest.approx(0.048)
