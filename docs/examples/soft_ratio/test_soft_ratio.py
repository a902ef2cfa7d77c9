"""soft_ratio by hand, and what every loss must hold to: pytest test_soft_ratio.py"""

import math
from pathlib import Path

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.recipe.load import load
from posttrain.recipe.stages import RlRecipe
from posttrain.train.objective import Objective

HERE = Path(__file__).parent


def objective(**changes: object) -> Objective:
    """That of recipe.yaml; keyword arguments change keys of its loss."""
    overrides = [f"loss.{key}={value}" for key, value in changes.items()]
    return Objective.from_recipe(load(str(HERE / "recipe.yaml"), overrides).require(RlRecipe))


def two_rows(ratio: float) -> tuple[RolloutBatch, torch.Tensor]:
    """One group, rewards 1 and 0, lengths 2 and 1; every token has this ratio; garbage after the second row."""
    mask = torch.tensor([[True, True], [True, False]])
    logp = torch.where(mask, -1.0, 1e30).double().requires_grad_()
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0]),
        mask=mask,
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        correct=torch.tensor([1.0, 0.0], dtype=torch.float64),
        truncated=torch.tensor([False, False]),
        old_logp=torch.where(mask, -1.0 - math.log(ratio), -7.0).double(),
    )
    return batch, logp


def loss_and_gradient(ratio: float, **changes: object) -> tuple[float, torch.Tensor]:
    batch, logp = two_rows(ratio)
    parts = objective(**changes)
    assigned = parts.compute_advantages(batch)
    loss, _ = parts.loss(assigned, logp, parts.totals(assigned))
    return loss.item(), torch.autograd.grad(loss, logp)[0]


def test_on_policy_it_is_the_policy_gradient() -> None:
    """r = 1: each of the 3 tokens gets -A / 3, A = +-0.5 (mean 0.5, no scaling); the padding gets nothing."""
    loss, gradient = loss_and_gradient(1.0)
    assert loss == pytest.approx(-(0.5 + 0.5 - 0.5) / 3)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5, -0.5], [0.5, 0.0]]).double() / 3)


def test_far_away_it_fades() -> None:
    """r = 1.4, width 0.2: tanh(2) = 0.9640, so the value is 1.1928 and the slope 1.4 * (1 - 0.9640^2) = 0.0989."""
    loss, gradient = loss_and_gradient(1.4)
    assert loss == pytest.approx(-0.5 * 1.1928 / 3, abs=1e-5)
    torch.testing.assert_close(gradient[0], torch.full((2,), -0.5 * 0.0989 / 3).double(), atol=1e-5, rtol=0)


def test_a_wide_one_is_not_limited() -> None:
    """tanh(x / w) * w -> x: the surrogate without any clip, value r A and slope r A."""
    loss, gradient = loss_and_gradient(1.4, width=1e4)
    assert loss == pytest.approx(-0.5 * 1.4 / 3)
    assert gradient[0, 0].item() == pytest.approx(-0.5 * 1.4 / 3)
