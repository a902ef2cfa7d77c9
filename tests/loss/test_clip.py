"""PPO clipped surrogate: hand-computed values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.loss.clip import clip

GARBAGE = 5.0


def batch(ratios: list[list[float]], advantages: list, mask: list[list[int]]) -> tuple[RolloutBatch, torch.Tensor]:
    """Return a batch whose logp - old_logp is log(ratios)."""
    old = torch.full((len(ratios), len(ratios[0])), -1.0, dtype=torch.float64)
    logp = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    rows = RolloutBatch(
        group_ids=torch.zeros(len(ratios), dtype=torch.long),
        mask=torch.tensor(mask, dtype=torch.bool),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_logp=old,
    )
    return rows, logp


def test_value_gradient_and_clip_fraction() -> None:
    """clip_low 0.2, clip_high 0.28; value max(-A r, -A clip(r)), gradient by logp -A r where the first branch holds.

    A = 1:  r 1.5 -> max(-1.5, -1.28) = -1.28, cut: 0.  r 1 -> -1, gradient -1.  r 0.5 -> max(-0.5, -0.8) = -0.5, -0.5.
    A = -2: r 0.5 -> max(1, 1.6) = 1.6, cut: 0.  r 1.5 -> max(3, 2.56) = 3, gradient 3.  Padding: 0.
    """
    rows, logp = batch([[1.5, 1.0, 0.5], [0.5, 1.5, GARBAGE]], [1.0, -2.0], [[1, 1, 1], [1, 1, 0]])
    found = clip(rows, logp, clip_low=0.2, clip_high=0.28)
    found.values.sum().backward()
    expected = torch.tensor([[-1.28, -1.0, -0.5], [1.6, 3.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found.values.detach(), expected)
    torch.testing.assert_close(
        logp.grad, torch.tensor([[0.0, -1.0, -0.5], [0.0, 3.0, 0.0]], dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    assert found.stats["clip_ratio/high_mean"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert found.stats["clip_ratio/low_mean"].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert found.stats["clip_ratio/region_mean"].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert not any(stat.requires_grad for stat in found.stats.values())


def test_clip_high_defaults_to_clip_low() -> None:
    rows, logp = batch([[1.25, 0.75]], [1.0], [[1, 1]])
    torch.testing.assert_close(
        clip(rows, logp, clip_low=0.1).values, clip(rows, logp, clip_low=0.1, clip_high=0.1).values
    )
    assert clip(rows, logp, clip_low=0.1).values[0, 0].item() == pytest.approx(-1.1)


def test_without_old_logp_the_ratio_is_one_and_keeps_its_gradient() -> None:
    rows, logp = batch([[3.0, 0.2]], [2.0], [[1, 1]])
    found = clip(rows.replace(old_logp=None), logp)
    found.values.sum().backward()
    assert found.values.tolist() == [[-2.0, -2.0]]
    assert logp.grad.tolist() == [[-2.0, -2.0]]


def test_advantages_can_be_given_per_token() -> None:
    """A = (1, -1) in one row, ratio 1: values -1 and 1; the padding's advantage is NaN and must not matter."""
    rows, logp = batch([[1.0, 1.0, 1.0]], [[1.0, -1.0, float("nan")]], [[1, 1, 0]])
    found = clip(rows, logp)
    found.values.sum().backward()
    assert found.values.tolist() == [[-1.0, 1.0, 0.0]]
    assert logp.grad.tolist() == [[-1.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratio_is_clamped_at_20_without_gradient(dtype: torch.dtype) -> None:
    """logp - old_logp = 1000 with A = -1: r = e^20, finite, and no gradient beyond the limit."""
    logp = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    rows = RolloutBatch(
        group_ids=torch.zeros(1, dtype=torch.long),
        mask=torch.ones(1, 1, dtype=torch.bool),
        advantages=torch.tensor([-1.0], dtype=dtype),
        old_logp=torch.full((1, 1), -1000.0, dtype=dtype),
    )
    values = clip(rows, logp).values
    values.sum().backward()
    assert values.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert logp.grad.item() == 0.0


def test_batch_without_advantages_raises() -> None:
    rows, logp = batch([[1.0]], [1.0], [[1]])
    with pytest.raises(ValueError, match="no advantages"):
        clip(rows.replace(advantages=None), logp)


def test_dual_clip_caps_negative_advantages_only() -> None:
    """dual_clip 3. A = -2: r 5 -> min(max(10, 2.4), 6) = 6, no gradient; r 2 -> 4, gradient 4. A = 1: r 0.5 as
    before."""
    rows, logp = batch([[5.0, 2.0], [0.5, 5.0]], [-2.0, 1.0], [[1, 1], [1, 1]])
    found = clip(rows, logp, dual_clip=3.0)
    found.values.sum().backward()
    torch.testing.assert_close(found.values.detach(), torch.tensor([[6.0, 4.0], [-0.5, -1.2]], dtype=torch.float64))
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, 4.0], [-0.5, 0.0]], dtype=torch.float64))
    assert found.stats["clip_ratio/dual_mean"].tolist() == [[1, 0], [0, 0]]


def test_dual_clip_of_one_or_less_raises() -> None:
    rows, logp = batch([[1.0]], [1.0], [[1]])
    with pytest.raises(UserError, match="dual_clip"):
        clip(rows, logp, dual_clip=1.0)
