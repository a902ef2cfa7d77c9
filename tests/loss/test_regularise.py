"""Regularizers: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.perception import masked_kl, perturbed_kl
from posttrain.loss.proximal import kl_old
from posttrain.loss.regularise import calibrl, forward_kl, llds, reference_power, tempered_reference

F64 = torch.float64
NAN = float("nan")


def batch(logp: list[list[float]], mask: list[list[int]], **fields: Any) -> tuple[RolloutBatch, torch.Tensor]:
    tensors = {name: torch.tensor(value, dtype=F64) for name, value in fields.items()}
    rows = RolloutBatch(torch.zeros(len(mask), dtype=torch.long), torch.tensor(mask, dtype=torch.bool), **tensors)
    return rows, torch.tensor(logp, dtype=F64).requires_grad_()


# old - logp = (0.5, -0.2 | tool | -1, 0.3) with A = 1; (0.4) with A = -1
FALLEN = {
    "logp": [[-1.5, -0.8, 9.0, -1.0, -2.3], [-1.4, 9, 9, 9, 9]],
    "mask": [[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]],
    "old_logp": [[-1.0, -1.0, 7.0, -2.0, -2.0], [-1.0, 7, 7, 7, 7]],
    "advantages": [1.0, -1.0],
}


@pytest.mark.parametrize(
    ("gate", "active"),
    [("action", [1, 0, 0, 0, 0]), ("response", [0, 0, 0, 0, 0]), ("token", [1, 0, 0, 0, 1])],
)
def test_llds_gates_by_row_token_and_advantage(gate: Any, active: list[int]) -> None:
    """Runs: 0.5 - 0.2 > 0 active, -1 + 0.3 < 0 not; the row -0.4 not; only tokens that fell count; A < 0 never."""
    rows, logp = batch(**FALLEN)
    found = llds(rows, logp, gate=gate)
    found.values.sum().backward()
    assert found.stats["llds/active"].tolist() == [active, [0, 0, 0, 0, 0]]
    assert logp.grad.tolist() == [[-float(a) for a in active], [0.0] * 5]
    assert found.values.sum().item() == pytest.approx(0.5 * active[0] + 0.3 * active[4])


def test_llds_denominators_and_answer_weight() -> None:
    rows, logp = batch(**FALLEN)
    assert llds(rows, logp).counted.sum() == 4
    assert llds(rows, logp, denominator="all").counted.sum() == 5
    rows = rows.replace(answer_mask=torch.tensor([[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool))
    assert llds(rows, logp, gate="token", answer_weight=0.5).values.sum().item() == pytest.approx(0.5 + 0.15)


def test_llds_is_zero_before_the_policy_moved() -> None:
    rows, logp = batch(**FALLEN)
    found = llds(rows.replace(old_logp=None), logp)
    found.values.sum().backward()
    assert not bool(found.values.any())
    assert not bool(logp.grad.any())


def test_calibrl_values_and_slopes_around_the_expert() -> None:
    """A = (2, -0.5). Right row: logp below the expert by 1: 2 * 1, slope -2; above by 0.5: 2 * -0.25, slope -1.
    Wrong row: below by 1: 0.5 * 0.5 * -1, slope 0.25; above by 0.5: 0.5 * 0.5, slope 0.5."""
    rows, logp = batch(
        [[-2.0, -0.5], [-2.0, -0.5]],
        [[1, 1], [1, 1]],
        expert_logp=[[-1.0, -1.0], [-1.0, -1.0]],
        advantages=[2.0, -0.5],
        correct=[1.0, 0.0],
    )
    found = calibrl(rows, logp)
    found.values.sum().backward()
    torch.testing.assert_close(found.values.detach(), torch.tensor([[2.0, -0.5], [-0.25, 0.25]], dtype=F64))
    torch.testing.assert_close(logp.grad, torch.tensor([[-2.0, -1.0], [0.25, 0.5]], dtype=F64))


def test_calibrl_uses_the_experts_mean_past_its_end_and_is_zero_without_an_expert() -> None:
    rows, logp = batch(
        [[-2.0, -3.0, -2.0], [-1.0, -1.0, 5.0]],
        [[1, 1, 1], [1, 1, 0]],
        expert_logp=[[-1.0, -2.0, NAN], [NAN, NAN, 3.0]],
        advantages=[1.0, 1.0],
        correct=[1.0, 1.0],
    )
    assert calibrl(rows, logp).values.tolist() == [[1.0, 1.0, 0.5], [0.0, 0.0, 0.0]]
    assert calibrl(rows, logp, expert_baseline="mean").values.tolist() == [[0.5, 1.5, 0.5], [0.0, 0.0, 0.0]]


def test_forward_kl_value_and_gradient() -> None:
    """rho = 2: 2 ln 2 - 1, gradient -2 ln 2. Equal: 0 and 0. hat - logp = 9 is clamped to 5."""
    rows, logp = batch([[-1.0, -1.0, -10.0]], [[1, 1, 1]], tempered_ref_logp=[[-1.0 + math.log(2), -1.0, -1.0]])
    found = forward_kl(rows, logp)
    found.values.sum().backward()
    assert found.values[0].tolist() == pytest.approx([2 * math.log(2) - 1, 0.0, 4 * math.exp(5) + 1])
    assert logp.grad[0].tolist() == pytest.approx([-2 * math.log(2), 0.0, -5 * math.exp(5)])


def test_reference_power_follows_the_reward() -> None:
    rows, _ = batch([[0.0]] * 4, [[1]] * 4, rewards=[1.0, 0.0, 0.5, NAN])
    assert reference_power(rows, phi_min=0.4).tolist() == pytest.approx([1.0, 0.4, 0.7, 1.0])
    assert reference_power(rows, reward_max=0.0).tolist() == [1.0] * 4


def test_tempered_reference_is_normalized() -> None:
    """Logits (2 ln 3, 0) at power 1/2: 3 : 1, so ln(3/4)."""
    rows, _ = batch([[0.0]], [[1]], rewards=[0.0])
    logits = torch.tensor([[[2 * math.log(3), 0.0]]], dtype=F64)
    assert tempered_reference(rows, logits, torch.tensor([[0]])).item() == pytest.approx(math.log(0.75))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k3", 0.5 + math.log(2) - 1, 0.5),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("is", 2 * math.log(2) - 1, 2 * math.log(2)),
    ],
)
def test_kl_to_the_old_policy_by_estimator(estimator: Any, value: float, slope: float) -> None:
    """r = 2: k3 1/2 + ln 2 - 1 with slope 1 - 1/2; k2; r ln r - r + 1 with slope r ln r."""
    rows, logp = batch([[math.log(2) - 1]], [[1]], old_logp=[[-1.0]])
    found = kl_old(rows, logp, estimator=estimator)
    found.values.sum().backward()
    assert (found.values.item(), logp.grad.item()) == pytest.approx((value, slope))


def test_masked_kl() -> None:
    """r = exp(logp - masked): ln r = 1 gives e - 2, 0 gives 0, -1 gives 1 / e; values are clamped at 10, without
    gradient.

    Gradient of -(r - ln r - 1): 1 - r.
    """
    rows, logp = batch(
        [[-1.0, -2.0, 7.0], [-3.0, -1.0, 7.0]], [[1, 1, 0], [1, 1, 0]], masked_logp=[[-2, -2, NAN], [-2, -9, NAN]]
    )
    found = masked_kl(rows, logp)
    expected = torch.tensor([[math.e - 2, 0, 0], [1 / math.e, 10, 0]], dtype=F64)
    torch.testing.assert_close(found.values, -expected)
    torch.testing.assert_close(found.stats["masked_kl"], expected)
    found.values.sum().backward()
    slopes = torch.tensor([[1 - math.e, 0, 0], [1 - 1 / math.e, 0, 0]], dtype=F64)
    torch.testing.assert_close(logp.grad, slopes)
    with pytest.raises(ValueError, match="needs the log-probs under masked images"):
        masked_kl(rows.replace(masked_logp=None), logp)


def test_perturbed_kl() -> None:
    """exp(-d) + d - 1: d = 1 gives 1 / e, d = -1 gives e - 2; values are clamped at 10. The slope is 1 - exp(-d), and 0
    beyond the clamp."""
    rows, logp = batch(
        [[-1.0, -2.0, 7.0], [-3.0, -9.0, 7.0]], [[1, 1, 0], [1, 1, 0]], perturbed_logp=[[-2, -2, NAN], [-2, -2, NAN]]
    )
    found = perturbed_kl(rows, logp)
    expected = torch.tensor([[1 / math.e, 0, 0], [math.e - 2, 10, 0]], dtype=F64)
    torch.testing.assert_close(found.values, expected)
    torch.testing.assert_close(found.stats["perturbed_kl"], expected)
    found.values.sum().backward()
    slopes = torch.tensor([[1 - 1 / math.e, 0, 0], [1 - math.e, 0, 0]], dtype=F64)
    torch.testing.assert_close(logp.grad, slopes)
    with pytest.raises(ValueError, match="needs the log-probs under noisy images"):
        perturbed_kl(rows.replace(perturbed_logp=None), logp)
