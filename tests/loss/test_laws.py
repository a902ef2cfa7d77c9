"""Invariants of every policy loss and KL estimator in the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.batch import RolloutBatch
from posttrain.recipe.rl_stage import WITHOUT_RATIO

NAMES = [
    (kind, name)
    for kind in ("loss", "kl", "regulariser")
    for name in sorted(registry.load_index()[kind])
    if name
    not in ("value", "critic", "router_balance", "entropy_bonus", "full")  # their gradient is not by the log-probs
]
WIDE: dict[str, dict[str, float]] = {"fiberpo": {"c_pos": 5.0, "c_neg": 4.0, "epsilon": 3.0}}  # gates let all through
LENGTHS = torch.tensor([4, 1, 0, 3])
MASK = torch.arange(4) < LENGTHS[:, None]


def batch(garbage: float, dtype: torch.dtype = torch.float64) -> tuple[RolloutBatch, torch.Tensor]:
    """Return four rows of uneven length, one of them empty; every masked cell holds `garbage`."""
    generator = torch.Generator().manual_seed(1)

    def matrix() -> torch.Tensor:
        return torch.where(MASK, -torch.rand(4, 4, generator=generator, dtype=torch.float64) * 2, garbage).to(dtype)

    rows = RolloutBatch(
        group_ids=torch.tensor([0, 0, 1, 1]),
        mask=MASK,
        old_logp=matrix(),
        ref_logp=matrix(),
        rollout_logp=matrix(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=dtype),
        correct=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype),
        channels=dict.fromkeys(("0", "1"), torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=dtype)),
        vocab_mean_logp=matrix(),
        old_vocab_mean_logp=matrix(),
        tempered_ref_logp=matrix(),
        masked_logp=matrix(),
        perturbed_logp=matrix(),
        expert_logp=matrix(),
        answer_mask=matrix() > -0.5,
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype),
        turn_ids=torch.where(MASK, torch.arange(4) // 2, 9),
        values=torch.where(MASK, 0.3, garbage).to(dtype),
        opponent_logp=torch.where(MASK, -0.7, garbage).to(dtype),
        prox_logp=torch.where(MASK, -0.6, garbage).to(dtype),
        new_values=torch.where(MASK, 0.4, garbage).to(dtype),
        hint_mask=MASK & (torch.arange(4) < 2),
    )
    return rows, matrix().requires_grad_()


def evaluate(kind: Any, name: str, garbage: float, dtype: torch.dtype = torch.float64) -> tuple[Any, torch.Tensor]:
    rows, logp = batch(garbage, dtype)
    found = registry.get(kind, name).function(rows, logp, **WIDE.get(name, {}))
    found.values.sum().backward()
    assert logp.grad is not None
    return found, logp.grad


def test_the_registry_has_losses_and_kl_estimators() -> None:
    assert ("loss", "clip") in NAMES
    assert ("kl", "k3") in NAMES


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize("garbage", [7.0, 1e30, float("inf"), float("nan")])
def test_masked_cells_change_nothing(kind: str, name: str, garbage: float) -> None:
    (clean, clean_gradient), (dirty, dirty_gradient) = evaluate(kind, name, 0.0), evaluate(kind, name, garbage)
    torch.testing.assert_close(dirty.values, clean.values, rtol=0, atol=0)
    torch.testing.assert_close(dirty_gradient, clean_gradient, rtol=0, atol=0)
    assert bool(clean_gradient[MASK].any())
    for stat in clean.stats:
        seen = MASK if clean.stats[stat].dim() == 2 else MASK.any(-1)
        torch.testing.assert_close(dirty.stats[stat][seen], clean.stats[stat][seen], rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_masked_cells_and_empty_rows_are_zero(kind: str, name: str) -> None:
    found, gradient = evaluate(kind, name, float("nan"))
    assert found.values.shape == MASK.shape
    assert bool((found.values[~MASK] == 0).all())
    assert bool((gradient[~MASK] == 0).all())


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_rows_do_not_depend_on_each_other(kind: str, name: str) -> None:
    """Any subset of rows gives the same values for these rows."""
    rows, logp = batch(7.0)
    function = registry.get(kind, name).function
    whole = function(rows, logp).values
    for part in ([0], [1, 3], [2]):
        torch.testing.assert_close(function(rows.select(part), logp[part]).values, whole[part])


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_float32_is_close_to_float64(kind: str, name: str) -> None:
    (single, single_gradient), (double, double_gradient) = (
        evaluate(kind, name, 7.0, dtype) for dtype in (torch.float32, torch.float64)
    )
    assert single.values.dtype == torch.float32
    torch.testing.assert_close(single.values.double(), double.values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single_gradient.double(), double_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_stats_are_detached_and_have_one_value_per_row_or_token(kind: str, name: str) -> None:
    rows, logp = batch(0.0)
    stats = registry.get(kind, name).function(rows, logp).stats
    assert stats
    for value in stats.values():
        assert not value.requires_grad
        assert value.shape in (MASK.shape, MASK.shape[:1])


@pytest.mark.parametrize("name", sorted(registry.load_index()["loss"]))
def test_replayable_losses_depend_on_the_log_probs_of_the_sampling_policy(name: str) -> None:
    """Changing the sampling policy's log-probs (`old_logp`, or `rollout_logp` if the loss reads it) changes the
    gradient. Losses that `replay` refuses do not depend on them."""
    rows, logp = batch(0.0)
    old = rows.old_logp
    assert old is not None and rows.rollout_logp is not None
    both = "rollout_logp" in registry.load_index()["loss"][name].get("needs", ())
    other = {"rollout_logp": rows.rollout_logp - 0.1} if both else {"old_logp": old - 0.1}
    near = (old + 0.02).detach()  # inside of every clip range and gate
    gradients = []
    for given in (rows, rows.replace(**other)):
        logp = near.clone().requires_grad_()
        values = registry.get("loss", name).function(given, logp, **WIDE.get(name, {})).values
        learns = values.requires_grad  # a critic's does not read the log-probs
        gradients.append(torch.autograd.grad(values.sum(), logp)[0][MASK] if learns else torch.zeros(0))
    assert torch.equal(*gradients) == (name in WITHOUT_RATIO)
