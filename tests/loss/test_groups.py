"""Losses over whole groups: hand-computed values and shared invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.batch import GroupLoss, RolloutBatch
from posttrain.loss.group_pairs import copg, p3o, trpa
from posttrain.loss.groups import disco, group_key, pacs

F64 = torch.float64
ALL = sorted(registry.load_index()["group_loss"])


def singles(logp: list[float], groups: list[int], **fields: Any) -> tuple[RolloutBatch, torch.Tensor]:
    """Return rows of one token; old and reference log-probs are -1 unless given."""
    leaf = torch.tensor(logp, dtype=F64)[:, None].requires_grad_()
    made = {
        "old_logp": torch.full_like(leaf, -1.0).detach(),
        "ref_logp": torch.full_like(leaf, -1.0).detach(),
        **{name: torch.tensor(value, dtype=F64) for name, value in fields.items()},
    }
    mask = torch.ones(len(logp), 1, dtype=torch.bool)
    return RolloutBatch(torch.tensor(groups), mask, **made), leaf


def mean(found: GroupLoss) -> torch.Tensor:
    weights = torch.ones_like(found.values) if found.weights is None else found.weights.to(found.values.dtype)
    return (found.values * weights).sum() / weights.sum()


def test_groups_are_numbered_in_order_of_appearance() -> None:
    key, groups = group_key(torch.tensor([7, 2, 7, 5]))
    assert (key.tolist(), groups) == ([0, 1, 0, 2], 3)


def test_disco_b_is_the_gap_of_mean_scores() -> None:
    """Scores -1 right, -2 and -4 wrong: gap -1 + 3 = 2. The all-right group gives 0 and stays in the mean: -2 / 2.
    K = mean of old - logp = 1 / 4 * (0 + 1 + 3 + 0) = 1: penalty 0.1 / 2 * (1 - 0.5)^2 = 0.0125 for both groups."""
    rows, logp = singles([-1.0, -2.0, -4.0, -1.0], [0, 0, 0, 1], correct=[1, 0, 0, 1])
    found = disco(rows, logp, objective="disco_b", kl_delta=0.5, kl_beta=0.1)
    assert found.values.tolist() == pytest.approx([-2 + 0.0125, 0.0125])
    mean(found).backward()
    penalty = 0.1 * 0.5 * -0.25  # beta [K - delta] dK / dlogp
    expected = [-0.5 + penalty, 0.25 + penalty, 0.25 + penalty, penalty]
    assert logp.grad[:, 0].tolist() == pytest.approx(expected)


def test_disco_weights_likelier_wrong_answers_more() -> None:
    """tau 1, wrong scores -1 and -2: log((e^-1 + e^-2) / 2); gradient by softmax weights 0.731 and 0.269."""
    rows, logp = singles([-1.0, -1.0, -2.0], [0, 0, 0], correct=[1, 0, 0])
    found = disco(rows, logp, tau=1.0, kl_beta=0.0)
    log_mean = math.log((math.exp(-1) + math.exp(-2)) / 2)
    assert found.values.item() == pytest.approx(1 + log_mean)
    mean(found).backward()
    share = 1 / (1 + math.exp(-1))
    assert logp.grad[:, 0].tolist() == pytest.approx([-1.0, share, 1 - share])


def test_disco_tends_to_disco_b_for_large_tau_and_is_zero_for_uniform_groups() -> None:
    rows, logp = singles([-1.0, -1.5, -2.5], [0, 0, 0], correct=[1, 0, 0])
    large = disco(rows, logp, tau=1e6, kl_beta=0.0).values
    torch.testing.assert_close(large, disco(rows, logp, objective="disco_b", kl_beta=0.0).values, rtol=0, atol=1e-6)
    uniform, logp = singles([-1.0, -1.5, -2.5], [0, 0, 0], correct=[0, 0, 0])
    assert disco(uniform, logp, kl_beta=0.0).values.item() == 0.0


def test_pacs_on_policy_value_and_gradient() -> None:
    """All psi = 0: loss ln 2; by psi -1/2 / 2 rows for the right row and +1/4 for the wrong one; psi_1 = q_1 - q_2, so
    by q -1/4 - 1/4 and its opposite: -A_rloo(correct) / N."""
    rows, logp = singles([-1.0, -1.0], [0, 0], correct=[1, 0])
    found = pacs(rows, logp, class_balance=False)
    assert found.values.item() == pytest.approx(math.log(2))
    mean(found).backward()
    assert logp.grad[:, 0].tolist() == pytest.approx([-0.5, 0.5])


def test_pacs_balances_right_and_wrong_rows_of_a_prompt() -> None:
    """1 right of 4: weights 4 / 2 = 2 and 4 / 6 = 2/3; all psi = 0, so the mean of w ln 2 is ln 2. By psi: 2 * -1/2 / 4
    = -1/4 and 2/3 * 1/2 / 4 = 1/12; by the right row's q: -1/4 + 3 * (1/12) * (-1/3) = -1/3."""
    rows, logp = singles([-1.0] * 4, [0] * 4, correct=[1, 0, 0, 0])
    found = pacs(rows, logp)
    assert found.values.item() == pytest.approx(math.log(2))
    mean(found).backward()
    assert logp.grad.sum().item() == pytest.approx(0.0, abs=1e-12)
    assert logp.grad[0].item() == pytest.approx(-1 / 3)


def test_pacs_of_a_single_row_is_cross_entropy_with_its_reward() -> None:
    rows, logp = singles([0.0], [0], correct=[1])  # q = 0 - (-1) = 1
    assert pacs(rows, logp).values.item() == pytest.approx(math.log1p(math.exp(-1)))


def test_copg_gradient_at_the_reference_is_the_reward_gap() -> None:
    """u = 0: value 0, gradient -(R_1 - R_2) and its opposite; off it beta / 2 (u_1 - u_2)^2 - ..."""
    rows, logp = singles([-1.0, -1.0], [0, 0], rewards=[2.0, 0.5])
    found = copg(rows, logp, beta=0.1)
    mean(found).backward()
    assert found.values.item() == 0.0
    assert logp.grad[:, 0].tolist() == pytest.approx([-1.5, 1.5])
    rows, logp = singles([0.0, -1.0], [0, 0], rewards=[2.0, 0.5])  # u = (1, 0)
    assert copg(rows, logp, beta=0.1).values.item() == pytest.approx(0.05 - 1.5)


def test_pairs_are_averaged_over_the_batch_not_per_group() -> None:
    """Groups of 3 and 2 rows: 3 pairs and 1; unscored rows make none."""
    rows, logp = singles([-1.0] * 5, [0, 0, 0, 1, 1], rewards=[1, 0, 0, 1, 0])
    assert copg(rows, logp).weights.tolist() == [3, 1]
    rows, logp = singles([-1.0] * 5, [0, 0, 0, 1, 1], rewards=[1, 0, float("nan"), 1, 0])
    assert copg(rows, logp).weights.tolist() == [1, 1]


@pytest.mark.parametrize("loss", [copg, p3o])
def test_reward_offset_per_prompt_changes_nothing(loss: Any) -> None:
    rows, logp = singles([-0.5, -1.0, -2.0], [0, 0, 0], rewards=[1.0, 0.0, 0.5])
    moved = rows.replace(rewards=rows.rewards + 10)
    torch.testing.assert_close(loss(moved, logp).values, loss(rows, logp).values)


def test_p3o_v1_clips_each_ratio() -> None:
    """D = 1, w = (1.5, 0.5): (max(-1.5, -1.2) + max(0.5, 0.8)) / 2 = -0.2, both cut. On-policy: gradient -+ D / 2."""
    ratios = [math.log(1.5) - 1, math.log(0.5) - 1]
    rows, logp = singles(ratios, [0, 0], rewards=[1.0, 0.0])
    found = p3o(rows, logp)
    mean(found).backward()
    assert found.values.item() == pytest.approx(-0.2)
    assert logp.grad[:, 0].tolist() == [0.0, 0.0]
    rows, logp = singles([-1.0, -1.0], [0, 0], rewards=[1.0, 0.0])
    mean(p3o(rows, logp)).backward()
    assert logp.grad[:, 0].tolist() == pytest.approx([-0.5, 0.5])


def test_p3o_v2_clips_the_quotient_and_subtracts_the_kl() -> None:
    """beta 0.5, old - ref = (1, 0): R - 0.5 * that = (0.5, 0): D = 0.5. q = 1.1: -0.5 * 0.5 * 1.1, gradient the
    same."""
    rows, logp = singles([math.log(1.1) - 1, -1.0], [0, 0], rewards=[1.0, 0.0], ref_logp=[[-2.0], [-1.0]])
    found = p3o(rows, logp, variant="v2", beta=0.5)
    mean(found).backward()
    assert found.values.item() == pytest.approx(-0.275)
    assert logp.grad[:, 0].tolist() == pytest.approx([-0.275, 0.275])


def test_trpa_prefers_better_levels() -> None:
    """Levels 1, 2, 3 with s = 0: three pairs, each ln 2; gradient by s: -1/2 beta kappa a pair: (-2 * 2.5, 2.5 - 1, 2.5
    + 1) * 0.05 / 3."""
    rows, logp = singles([-1.0] * 3, [0] * 3)
    rows = rows.replace(components={"level": torch.tensor([1.0, 2.0, 3.0], dtype=F64)})
    found = trpa(rows, logp, level="level")
    mean(found).backward()
    assert (found.values.item(), found.weights.item()) == pytest.approx((math.log(2), 3))
    assert logp.grad[:, 0].tolist() == pytest.approx([-0.25 / 3, 0.075 / 3, 0.175 / 3])


def test_trpa_without_pairs_falls_back_to_single_rows() -> None:
    """s = (1, 0): mean of ln(1 + e^-1) for the correct row and ln 2 for the other, each alone in its group."""
    rows, logp = singles([0.0, -1.0], [0, 1], rewards=[1.0, 0.0], correct=[1, 0])
    found = trpa(rows, logp)
    assert found.values.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log(2)])
    assert found.weights.tolist() == [0, 0]


LENGTHS = torch.tensor([3, 1, 2, 0, 2, 3])
MASK = torch.arange(3) < LENGTHS[:, None]


def build_uneven_groups(garbage: float) -> tuple[RolloutBatch, torch.Tensor]:
    """Return groups of 4 and 2 rows with an empty row; masked cells hold garbage."""
    generator = torch.Generator().manual_seed(3)

    def matrix() -> torch.Tensor:
        return torch.where(MASK, -torch.rand(6, 3, generator=generator, dtype=F64), garbage)

    rows = RolloutBatch(
        group_ids=torch.tensor([4, 4, 4, 4, 1, 1]),
        mask=MASK,
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=F64),
        correct=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=F64),
        lengths=LENGTHS,
        old_logp=matrix(),
        ref_logp=matrix(),
        advantages=torch.zeros(6, dtype=F64),
    )
    return rows, matrix().requires_grad_()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_garbage_under_the_mask_changes_nothing(name: str, garbage: float) -> None:
    function = registry.get("group_loss", name).function
    results = []
    for fill in (0.0, garbage):
        rows, logp = build_uneven_groups(fill)
        found = function(rows, logp)
        found.values.sum().backward()
        assert bool((logp.grad[~MASK] == 0).all())
        results.append((found.values.detach(), logp.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert bool(results[0][1].any())


@pytest.mark.parametrize("name", ALL)
def test_group_values_are_in_order_of_appearance_and_group_weights_are_detached(name: str) -> None:
    rows, logp = build_uneven_groups(0.0)
    function = registry.get("group_loss", name).function
    keys = {"kl_beta": 0.0} if "kl_beta" in registry.get("group_loss", name).params else {}
    found = function(rows, logp, **keys)
    assert found.values.shape == (2,)
    for k, part in enumerate(([0, 1, 2, 3], [4, 5])):
        alone = function(rows.select(part), logp[part], **keys)
        torch.testing.assert_close(alone.values[0], found.values[k])
        if found.weights is not None:
            assert alone.weights[0] == found.weights[k]
    if found.weights is not None:
        assert torch.equal(function(rows, torch.zeros_like(logp), **keys).weights, found.weights)
    for stat in found.stats.values():
        assert stat.shape == (2,)
        assert not stat.requires_grad
