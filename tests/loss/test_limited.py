"""Clamped quantities stay finite and keep the gradient that leads back inside the limit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posttrain.batch import PairBatch, RolloutBatch
from posttrain.loss import kl, pair, proximal, regularise, reward_model
from posttrain.loss.clip import limit_value

F64 = torch.float64


def rows(d: list[float], ratio: float = 1.0, **more: Tensor) -> tuple[RolloutBatch, Tensor]:
    """Return one row with logp = -1, ref_logp = -1 - d and old_logp = -1 - ln(ratio)."""
    logp = torch.full((1, len(d)), -1.0, dtype=F64, requires_grad=True)
    return RolloutBatch(
        group_ids=torch.zeros(1, dtype=torch.long),
        mask=torch.ones(1, len(d), dtype=torch.bool),
        ref_logp=logp.detach() - torch.tensor([d], dtype=F64),
        old_logp=logp.detach() - math.log(ratio),
        **more,
    ), logp


def gradient(values: Tensor, of: Tensor) -> list[float]:
    return torch.autograd.grad(values.sum(), of)[0].flatten().tolist()


def test_limit_value_blocks_outward_gradients_and_passes_inward_ones() -> None:
    """x = -2, 0, 2 within [-1, 1]; the loss +x descends to the left, -x to the right."""
    x = torch.tensor([-2.0, 0.0, 2.0], dtype=F64, requires_grad=True)
    assert limit_value(x, -1, 1).tolist() == [-1, 0, 1]
    assert gradient(limit_value(x, -1, 1), x) == [0, 1, 1]
    assert gradient(-limit_value(x, -1, 1), x) == [-1, -1, 0]
    assert torch.autograd.gradcheck(lambda y: limit_value(y, -9, 9) ** 2, (x,)), "within it is x"


@pytest.mark.parametrize("d", [-100.0, -20.0, -5.0, -math.log(14), 11.5, 30.0])
def test_k3_beyond_its_limit_pulls_the_token_back(d: float) -> None:
    """A token 14 times rarer than under the reference: the value is clamped to 10, the gradient stays at 1 -
    exp(2.6109)."""
    batch, logp = rows([d])
    found = kl.k3(batch, logp)
    assert found.values.item() == pytest.approx(10)
    assert found.stats["kl/clamped"].item() == 1
    (slope,) = gradient(found.values, logp)
    assert slope == pytest.approx(-12.610868638 if d < 0 else 1.0, rel=1e-4)


@pytest.mark.parametrize(
    "estimator", [kl.k2, kl.k3, kl.k3_is, kl.k3_straight_through, kl.k1_straight_through, kl.absolute]
)
@pytest.mark.parametrize("d", [-1000.0, -30.0, -12.0, -2.7, -0.5, 0.5, 3.0, 12.0, 30.0, 1000.0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_every_estimator_moves_the_policy_towards_the_reference(
    estimator: Callable[..., object], d: float, ratio: float
) -> None:
    """Gradient descent lowers |d| for every d. k3_is once drove a rare token further away (only the gradient of its
    ratio remained)."""
    batch, logp = rows([d], ratio)
    (slope,) = gradient(estimator(batch, logp).values, logp)  # type: ignore[attr-defined]
    assert math.isfinite(slope) and slope * d > 0


def test_k3_is_gradient_at_its_limit() -> None:
    """r (k3 + 1 - exp(-d)) = r d with d at the limit: 2 * -2.6109, and 2 * 11."""
    batch, logp = rows([-50.0, 50.0], ratio=2.0)
    found = kl.k3_is(batch, logp).values
    assert found.flatten().tolist() == pytest.approx([20, 20])
    assert gradient(found, logp) == pytest.approx([2 * -2.6108686, 2 * 10.9999833], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k3_is_finite_in_every_dtype(dtype: torch.dtype) -> None:
    batch, _ = rows([-1e4, -90.0, 90.0, 1e4])
    logp = torch.full((1, 4), -1.0, dtype=dtype, requires_grad=True)
    found = kl.k3(batch.replace(ref_logp=batch.ref_logp.to(dtype)), logp).values
    assert found.float().tolist()[0] == pytest.approx([10] * 4, rel=0.02)
    assert all(map(math.isfinite, gradient(found, logp)))


@pytest.mark.parametrize("gap", [5.5, 9.0, 200.0])
def test_forward_kl_pulls_a_rare_token_back(gap: float) -> None:
    """hat - logp is clamped to 5: -rho ln rho = -5 e^5."""
    batch, logp = rows([0.0], tempered_ref_logp=torch.full((1, 1), gap - 1, dtype=F64))
    values = regularise.forward_kl(batch, logp).values
    assert values.item() == pytest.approx(4 * math.exp(5) + 1)
    assert gradient(values, logp) == pytest.approx([-5 * math.exp(5)])


@pytest.mark.parametrize(
    ("estimator", "d", "slope"),
    [
        ("k3", -25.0, 1 - math.exp(20)),
        ("k3", 25.0, 1 - math.exp(-20)),
        ("k2", 25.0, 20.0),
        ("k2", -25.0, -20.0),
        ("is", 25.0, 20 * math.exp(20)),
        ("is", -25.0, -20 * math.exp(-20)),
    ],
)
def test_kl_to_the_old_policy_pulls_back(estimator: str, d: float, slope: float) -> None:
    batch, logp = rows([0.0])
    batch = batch.replace(old_logp=logp.detach() - d)
    values = proximal.kl_old(batch, logp, estimator=estimator).values  # type: ignore[arg-type]
    assert gradient(values, logp) == pytest.approx([slope])
    if estimator != "k3":
        free = batch.replace(advantages=torch.zeros(1, dtype=F64))
        mirrored = proximal.mirror_step(free, logp, iteration=1, total_iterations=1, kl=estimator)  # type: ignore[arg-type]
        assert gradient(mirrored.values, logp) == pytest.approx([slope])


@pytest.mark.parametrize(("log_std", "error", "slope"), [(7.0, 1.0, 1.0), (-7.0, 1.0, -math.exp(10)), (-7.0, 0.0, 0.0)])
def test_deviation_out_of_range_is_pulled_back(log_std: float, error: float, slope: float) -> None:
    """1 - (error / s)^2 at the limit: a deviation that is too large shrinks, one that is too small grows; gradients
    that lead further out are zero."""
    stds = torch.tensor([[log_std]], dtype=F64, requires_grad=True)
    values = reward_model.gaussian_nll(torch.zeros(1, 1, dtype=F64), stds, torch.full((1, 1), error, dtype=F64))
    assert gradient(values, stds) == pytest.approx([slope], rel=1e-3)


def test_orpo_lowers_a_rejected_side_of_probability_one() -> None:
    """ORPO's odds need m < 0: at m = 0 the clamp once removed the gradient of the side that needed it most."""
    rejected = torch.zeros(1, dtype=F64, requires_grad=True)
    one = torch.ones(1)
    batch = PairBatch(
        chosen_logp=torch.tensor([-1.0], dtype=F64), rejected_logp=rejected, chosen_length=one, rejected_length=one
    )
    found = pair.orpo(batch)
    (slope,) = gradient(found.losses, rejected)
    assert math.isfinite(slope) and slope > 0
