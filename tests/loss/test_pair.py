"""Pair losses: hand-computed values. s is the sigmoid; z = ln 3 has s(z) = 3/4."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.batch import PairBatch
from posttrain.errors import UserError
from posttrain.loss.pair import dpo, mean, simpo

LN3 = math.log(3)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs(chosen: float, rejected: float, **changes: Any) -> PairBatch:
    """Return one pair beside a pair of equal sides, reference log-probs -1, lengths 4 and 2."""
    batch = PairBatch(
        chosen_logp=column(chosen, -1.0).requires_grad_(),
        rejected_logp=column(rejected, -1.0).requires_grad_(),
        chosen_length=column(4, 4),
        rejected_length=column(2, 2),
        ref_chosen_logp=column(-1.0, -1.0),
        ref_rejected_logp=column(-1.0, -1.0),
    )
    return PairBatch(**{**vars(batch), **changes})


@pytest.mark.parametrize(
    ("settings", "expected", "slope"),
    [
        ({}, -math.log(3 / 4), -1 / 4),
        ({"label_smoothing": 0.1}, -0.9 * math.log(3 / 4) - 0.1 * math.log(1 / 4), -0.9 / 4 + 0.1 * 3 / 4),
        (
            {"label_smoothing": 0.1, "variant": "robust"},
            (-0.9 * math.log(3 / 4) + 0.1 * math.log(1 / 4)) / 0.8,
            (-0.9 / 4 - 0.1 * 3 / 4) / 0.8,
        ),
    ],
)
def test_dpo(settings: dict[str, Any], expected: float, slope: float) -> None:
    """beta 0.5, log-ratios 2 ln 3 and 0: z = ln 3. d loss / d chosen = beta * dz / P, with P = 2; rejected opposite."""
    batch = pairs(2 * LN3 - 1, -1.0)
    found = dpo(batch, beta=0.5, **settings)
    mean(found.losses).backward()
    assert found.losses[0].item() == pytest.approx(expected, rel=1e-12)
    assert batch.chosen_logp.grad[0].item() == pytest.approx(0.5 * slope / 2, rel=1e-12)
    assert batch.rejected_logp.grad[0].item() == pytest.approx(-0.5 * slope / 2, rel=1e-12)
    assert found.stats["chosen_rewards"].tolist() == pytest.approx([LN3, 0.0])
    assert found.stats["rejected_rewards"].tolist() == [0.0, 0.0]
    assert found.stats["margins"].tolist() == pytest.approx([LN3, 0.0])
    assert found.stats["accuracy"].tolist() == [1.0, 0.0]


def test_equal_sides_give_log_two_and_opposite_gradients() -> None:
    batch = pairs(-1.0, -1.0)
    losses = dpo(batch, beta=0.2).losses
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.log(2)] * 2)
    torch.testing.assert_close(batch.chosen_logp.grad, -batch.rejected_logp.grad)
    assert batch.chosen_logp.grad.tolist() == pytest.approx([-0.1, -0.1])


def test_robust_without_smoothing_is_sigmoid() -> None:
    batch = pairs(-3.0, -2.0)
    torch.testing.assert_close(dpo(batch, variant="robust").losses, dpo(batch).losses)


def test_constant_added_to_policy_and_reference_changes_nothing() -> None:
    moved = pairs(-3.0 + 5, -2.0, ref_chosen_logp=column(-1.0 + 5, -1.0))
    assert dpo(moved).losses[0].item() == pytest.approx(dpo(pairs(-3.0, -2.0)).losses[0].item())


@pytest.mark.parametrize(("gap", "expected"), [(50_000.0, 0.0), (-50_000.0, 5_000.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_margins_stay_finite(gap: float, expected: float, dtype: torch.dtype) -> None:
    """beta 0.1: z = +-5000 gives 0 or |z|, and finite gradients."""
    chosen = torch.tensor([gap], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, dtype=dtype)
    losses = dpo(PairBatch(chosen, zero, ref_chosen_logp=zero, ref_rejected_logp=zero)).losses
    losses.sum().backward()
    assert losses.item() == pytest.approx(expected)
    assert chosen.grad.isfinite().all()


def test_reference_free_needs_no_reference() -> None:
    """z = 0.5 * (2 ln 3 - 0)."""
    batch = pairs(2 * LN3, 0.0, ref_chosen_logp=None, ref_rejected_logp=None)
    assert dpo(batch, beta=0.5, reference_free=True).losses[0].item() == pytest.approx(-math.log(3 / 4))
    with pytest.raises(ValueError, match="reference"):
        dpo(batch)


def test_reference_log_probs_get_no_gradient() -> None:
    reference = column(-1.0, -1.0).requires_grad_()
    dpo(pairs(-3.0, -2.0, ref_chosen_logp=reference)).losses.sum().backward()
    assert reference.grad is None


@pytest.mark.parametrize("loss", [dpo, simpo])
def test_empty_batch_gives_zero_loss_and_zero_gradient(loss: Any) -> None:
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    number = mean(loss(PairBatch(none, none, none, none, none, none)).losses)
    number.backward()
    assert number.item() == 0.0


def test_sum_over_micro_batches_equals_whole_batch() -> None:
    losses = column(1.0, 2.0, 6.0)
    assert mean(losses).item() == 3.0
    assert (mean(losses[:1], pairs=3) + mean(losses[1:], pairs=3)).item() == pytest.approx(3.0)


def test_simpo() -> None:
    """beta 2, margin 0.5 * 2 = 1; means -1 and -1.5 - ln(3)/2: z = 2 (0.5 + ln(3)/2) - 1 = ln 3.

    d loss / d chosen = [beta * dz - sft] / (L_w P), dz = -1/4; d loss / d rejected = -beta * dz / (L_l P).
    """
    batch = pairs(-4.0, -3.0 - LN3)
    found = simpo(batch, sft_weight=0.3)
    mean(found.losses).backward()
    assert found.losses[0].item() == pytest.approx(-math.log(3 / 4) + 0.3 * 1.0, rel=1e-12)
    assert batch.chosen_logp.grad[0].item() == pytest.approx((-0.5 - 0.3) / (4 * 2), rel=1e-12)
    assert batch.rejected_logp.grad[0].item() == pytest.approx(0.5 / (2 * 2), rel=1e-12)
    assert found.stats["chosen_rewards"][0].item() == pytest.approx(-2.0)
    assert found.stats["accuracy"].tolist() == [1.0, 1.0]  # the second pair: -1/4 against -1/2


def test_simpo_hinge() -> None:
    """max(0, 1 - z): z = ln 3 > 1 gives 0; the second pair has z = 2 (-1/4 + 1/2) - 1 = -0.5."""
    assert simpo(pairs(-4.0, -3.0 - LN3), variant="hinge").losses.tolist() == pytest.approx([0.0, 1.5])


def test_simpo_ignores_length_at_equal_mean_log_prob() -> None:
    """A completion twice as long with the same mean log-prob."""
    longer = pairs(-6.0, -4.0, chosen_length=column(8, 4))
    assert simpo(longer).losses[0].item() == pytest.approx(simpo(pairs(-3.0, -4.0)).losses[0].item())


def test_length_zero_counts_as_one() -> None:
    batch = pairs(0.0, -1.0, chosen_length=column(0, 4), rejected_length=column(0, 2))
    assert simpo(batch).losses.isfinite().all()
    assert simpo(batch).stats["rejected_rewards"][0].item() == -2.0


def test_invalid_settings_raise() -> None:
    with pytest.raises(UserError, match="variant robust"):
        dpo(pairs(-3.0, -2.0), variant="robust", label_smoothing=0.5)
    with pytest.raises(UserError, match="hinge"):
        simpo(pairs(-3.0, -2.0), variant="hinge", label_smoothing=0.1)
    with pytest.raises(ValueError, match="lengths"):
        simpo(pairs(-3.0, -2.0, chosen_length=None))
