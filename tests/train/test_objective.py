"""The objective: hand-computed presets, the order of its steps, denominators, and refused settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.errors import RecipeError, UserError
from posttrain.recipe import presets
from posttrain.recipe.stages import RlRecipe
from posttrain.train.objective import Objective
from tests.preset_objectives import preset_objective

NAN = float("nan")
RL = (
    "dapo",
    "dr_grpo",
    "grpo",
)  # other presets are tested by the sweep over all presets and by invariants of their components
F64 = torch.float64


def batch(rewards: list[list[float]], lengths: list[int], **changes: Any) -> tuple[RolloutBatch, torch.Tensor]:
    """Return groups of rewards; rows of these lengths followed by garbage; old_logp and ref_logp differ from logp."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(0)

    def matrix() -> torch.Tensor:
        return torch.where(mask, -torch.rand(mask.shape, generator=generator, dtype=F64), 1e30)

    flat = torch.tensor([r for group in rewards for r in group], dtype=F64)
    rows = RolloutBatch(
        group_ids=torch.tensor([g for g, group in enumerate(rewards) for _ in group]),
        mask=mask,
        rewards=flat,
        correct=(flat > 0.5).to(F64),
        truncated=torch.zeros(len(flat), dtype=torch.bool),
        old_logp=matrix(),
        ref_logp=matrix(),
    )
    return rows.replace(**changes), matrix().requires_grad_()


def gradient(objective: Objective, rows: RolloutBatch, logp: torch.Tensor) -> tuple[float, torch.Tensor]:
    assigned = objective.compute_advantages(rows)
    loss, _ = objective.loss(assigned, logp, objective.totals(assigned))
    (found,) = torch.autograd.grad(loss, logp)
    return loss.item(), found


def test_grpo_on_policy_gradient() -> None:
    """Rewards (1, 0): A = +-sqrt(1/2) with eps 0. Ratio 1, N = 2, lengths 3 and 1: gradient -A / (N n_i) per token.

    The loss is -(A_1 + A_2) / 2 = 0, a mean of centered advantages: only the gradient is informative.
    """
    rows, logp = batch([[1, 0]], [3, 1], old_logp=None)
    loss, found = gradient(preset_objective("grpo", advantage={"eps": 0.0}), rows, logp)
    a = math.sqrt(0.5)
    assert loss == pytest.approx(0.0)
    torch.testing.assert_close(found, torch.tensor([[-a / 6] * 3, [a / 2, 0, 0]], dtype=F64))


def test_dr_grpo_on_policy_gradient() -> None:
    """A = +-1/2, norm_len 10: -A / (N * 10) a token, whatever the lengths are."""
    rows, logp = batch([[1, 0]], [3, 1], old_logp=None)
    _, found = gradient(preset_objective("dr_grpo", rollout={"max_new_tokens": 10}), rows, logp)
    torch.testing.assert_close(found, torch.tensor([[-1 / 40] * 3, [1 / 40, 0, 0]], dtype=F64))


def test_dapo_on_policy_gradient() -> None:
    """The second group is all right and is dropped, and 4 tokens remain. A = +-sqrt(1/2): -A / 4 per token."""
    rows, logp = batch([[1, 0], [1, 1]], [3, 1, 2, 2], old_logp=None)
    objective = preset_objective("dapo", advantage={"eps": 0.0})
    _, found = gradient(objective, rows, logp)
    a = math.sqrt(0.5)
    torch.testing.assert_close(found, torch.tensor([[-a / 4] * 3, [a / 4, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=F64))
    assert objective.compute_advantages(rows).keep.tolist() == [True, True, False, False]  # type: ignore[union-attr]


def test_dropped_rows_leave_both_denominators() -> None:
    """Also in row-mean modes: two rows remain, not four with two empty rows."""
    objective = preset_objective("dapo", loss={"aggregation": "seq_mean_token_mean"})
    rows, _ = batch([[1, 0], [1, 1]], [3, 1, 2, 2])
    totals = objective.totals(objective.compute_advantages(rows))
    assert (totals.tokens, totals.rows) == (4.0, 2.0)


@pytest.mark.parametrize(("scale", "expected"), [("group", math.sqrt(0.5)), ("batch", math.sqrt(0.5))])
def test_advantages_are_computed_from_kept_rows_only(scale: str, expected: float) -> None:
    """Also the batch std: with the dropped group of 5s it would be 2.6 instead of sqrt(1/2)."""
    rows, _ = batch([[1, 0], [5, 5]], [1, 1, 1, 1])
    assigned = preset_objective("dapo", advantage={"scale": scale, "eps": 0.0}).compute_advantages(rows)
    assert assigned.advantages.tolist() == pytest.approx([expected, -expected, 0.0, 0.0])  # type: ignore[union-attr]


def test_truncated_rows_are_masked_but_counted() -> None:
    """They stay in the group's mean and in the row count; their mask is empty."""
    truncated = torch.tensor([False, True])
    objective = preset_objective("grpo", loss={"mask_truncated": True}, advantage={"eps": 0.0})
    rows, logp = batch([[1, 0]], [2, 2], truncated=truncated, old_logp=None)
    assigned = objective.compute_advantages(rows)
    assert assigned.advantages.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])  # type: ignore[union-attr]
    assert objective.totals(assigned).rows == 2.0
    _, found = gradient(objective, rows, logp)
    torch.testing.assert_close(found, torch.tensor([[-math.sqrt(0.5) / 4] * 2, [0, 0]], dtype=F64))
    with pytest.raises(ValueError, match="truncated"):
        objective.compute_advantages(rows.replace(truncated=None))


def test_kl_in_the_loss_is_averaged_over_tokens() -> None:
    """Equal rewards: A = 0. d = 0.5 and 1, k2 = 0.125 and 0.5: their mean over the row's 2 tokens, over 2 rows."""
    rows, _ = batch([[1, 1]], [2, 0])
    logp = torch.full((2, 2), -1.0, dtype=F64, requires_grad=True)
    rows = rows.replace(ref_logp=torch.tensor([[-1.5, -2.0], [NAN, NAN]], dtype=F64), old_logp=None)
    objective = preset_objective("grpo", kl={"use": "k2", "coef": 0.1})
    assigned = objective.compute_advantages(rows)
    loss, stats = objective.loss(assigned, logp, objective.totals(assigned))
    assert loss.item() == pytest.approx(0.1 * (0.125 + 0.5) / 2 / 2)
    assert stats["kl"].item() == pytest.approx(0.625)


def test_kl_in_the_reward_is_subtracted_before_the_advantage() -> None:
    """Rewards 1, 1; old - ref is 0.5 + 1 in row 0 and 0 in row 1; coef 0.2: rewards 0.7 and 1, advantages -+0.15."""
    rows, logp = batch([[1, 1]], [2, 1])
    old = torch.tensor([[-1.0, -1.0], [-1.0, NAN]], dtype=F64)
    ref = torch.tensor([[-1.5, -2.0], [-1.0, NAN]], dtype=F64)
    rows = rows.replace(old_logp=old, ref_logp=ref)
    objective = preset_objective(
        "dr_grpo", rollout={"max_new_tokens": 4}, kl={"use": "k1", "coef": 0.2, "where": "reward"}
    )
    assigned = objective.compute_advantages(rows)
    assert assigned.advantages.tolist() == pytest.approx([-0.15, 0.15])  # type: ignore[union-attr]
    assert assigned.rewards.tolist() == [1.0, 1.0]  # type: ignore[union-attr]  # metrics show the reward as it was paid
    _, stats = objective.loss(assigned, logp, objective.totals(assigned))
    assert "kl" not in stats
    assert objective.reward_kl_metrics(rows) == {"kl": pytest.approx(0.5)}
    with pytest.raises(ValueError, match="before advantages"):
        objective.compute_advantages(rows.replace(old_logp=None))


def test_unscored_row_has_no_gradient_but_is_counted() -> None:
    rows, logp = batch([[1, NAN, 0]], [2, 2, 2], old_logp=None)
    objective = preset_objective("grpo", advantage={"eps": 0.0})
    _, found = gradient(objective, rows, logp)
    a = math.sqrt(0.5)
    torch.testing.assert_close(found, torch.tensor([[-a / 6] * 2, [0, 0], [a / 6] * 2], dtype=F64))


@pytest.mark.parametrize("name", RL)
@pytest.mark.parametrize("cut", [1, 3, 4])
def test_sum_over_micro_batches_equals_whole_batch(name: str, cut: int) -> None:
    """Micro-batches of any rows and lengths sum to the whole batch: loss, gradient and statistics."""
    objective = preset_objective(name, rollout={"max_new_tokens": 9}, kl={"coef": 0.1})
    rows, logp = batch([[1, 0, 0.2], [0, 0], [0, 1]], [5, 1, 0, 3, 2, 4, 4])
    assigned = objective.compute_advantages(rows)
    totals = objective.totals(assigned)
    whole, stats = objective.loss(assigned, logp, totals)
    (expected,) = torch.autograd.grad(whole, logp)
    parts = [list(range(cut)), list(range(cut, 7))]
    found = [objective.loss(assigned.select(part), logp[part], totals) for part in parts]
    (split,) = torch.autograd.grad(found[0][0] + found[1][0], logp)
    torch.testing.assert_close(found[0][0] + found[1][0], whole)
    torch.testing.assert_close(split, expected)
    for key, value in stats.items():
        torch.testing.assert_close(found[0][1][key] + found[1][1][key], value)


@pytest.mark.parametrize("name", RL)
@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_only_rows_with_a_signal_have_a_gradient(name: str, coef: float) -> None:
    objective = preset_objective(name, rollout={"max_new_tokens": 9}, kl={"coef": coef})
    rows, logp = batch([[1, 0], [1, 1], [0, 1, NAN]], [3, 2, 2, 2, 0, 4, 1], old_logp=None)
    _, found = gradient(objective, rows, logp)
    assert objective.has_signal(objective.compute_advantages(rows)).tolist() == found.ne(0).any(-1).tolist()


@pytest.mark.parametrize("name", RL)
@pytest.mark.parametrize(
    ("rewards", "lengths"),
    [([[1, 1], [1, 1]], [2, 1, 3, 1]), ([[1], [0]], [2, 2]), ([[NAN, NAN]], [2, 2]), ([[1, NAN]], [2, 2])],
    ids=["all right", "groups of one", "nothing scored", "one of two scored"],
)
def test_batch_without_a_signal_gives_zero_not_nan(name: str, rewards: list[list[float]], lengths: list[int]) -> None:
    rows, logp = batch(rewards, lengths)
    loss, found = gradient(preset_objective(name, rollout={"max_new_tokens": 9}), rows, logp)
    assert loss == 0.0
    assert not found.any()


@pytest.mark.parametrize("name", RL)
def test_batch_without_trained_tokens_gives_zero_not_nan(name: str) -> None:
    rows, logp = batch([[1, 0]], [2, 2])
    objective = preset_objective(name, rollout={"max_new_tokens": 9}, kl={"coef": 0.1})
    loss, found = gradient(objective, rows.replace(mask=torch.zeros_like(rows.mask)), logp)
    assert loss == 0.0
    assert not found.any()


@pytest.mark.parametrize("name", RL)
def test_presets_describe_their_choices(name: str) -> None:
    preset = presets.preset(name)
    assert preset.title and preset.purpose and preset.not_stated and preset.stage == "rl"
    assert {"advantage", "loss", "kl"} <= preset.choices.keys()
    assert preset_objective(name).needs.isdisjoint({"ref_logp", "old_logp"})


def test_an_override_changes_one_key() -> None:
    base = preset_objective("dapo")
    changed = preset_objective("dapo", loss={"clip_high": 0.3})
    assert base.surrogate.params == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
    assert changed.surrogate.params == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
    assert changed.aggregation == "token_mean"


def sections(base_dir: Path | None = None, **changes: Any) -> Objective:
    """Return an objective from recipe sections with these changes."""
    bare = {"model": {"path": "tiny"}, "data": {"source": "x"}, "rewards": [{"use": "x"}]}
    recipe = RlRecipe.model_validate({**bare, "rollout": {"max_new_tokens": 8}, **changes})
    recipe._base_dir = base_dir or Path.cwd()
    return Objective.from_recipe(recipe)


@pytest.mark.parametrize(
    ("kl", "needs"),
    [
        ({}, set()),
        ({"use": "k3", "coef": 0.0}, set()),
        ({"use": "k3", "coef": 0.1}, {"ref_logp"}),
        ({"use": "k1", "coef": 0.1, "where": "reward"}, {"ref_logp", "old_logp"}),
    ],
)
def test_needs_follow_from_the_components(kl: dict[str, Any], needs: set[str]) -> None:
    assert sections(kl=kl).needs - {"groups"} == needs


def test_norm_len_of_the_recipe_takes_precedence() -> None:
    assert sections(loss={"aggregation": "fixed"}).norm_len == 8
    assert sections(loss={"aggregation": "fixed", "norm_len": 5}).norm_len == 5


USER_LOSS = """
import torch
from posttrain.batch import TokenLoss

def reinforce(batch, logp, *, weight: float = 1.0):
    return TokenLoss(torch.where(batch.mask, -weight * batch.advantages[:, None] * logp, 0.0), {})
"""


def test_user_defined_loss(tmp_path: Path) -> None:
    """-w A logp, A = +-1/2 with scale none, w = 3, one token a row, N = 2: gradient -3 A / 2."""
    (tmp_path / "mine.py").write_text(USER_LOSS)
    objective = sections(
        loss={"use": "mine.py:reinforce", "weight": 3.0}, advantage={"scale": "none"}, base_dir=tmp_path
    )
    rows, logp = batch([[1, 0]], [1, 1])
    assert gradient(objective, rows, logp)[1].flatten().tolist() == pytest.approx([-0.75, 0.75])


def test_wrong_key_of_a_user_function_raises(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_LOSS)
    with pytest.raises(RecipeError, match=r"has no argument wait\n.*it takes: weight"):
        sections(loss={"use": "mine.py:reinforce", "wait": 3.0}, base_dir=tmp_path)
    with pytest.raises(RecipeError, match=r"no argument weigth\n.*it takes: weight\n.*did you mean `weight`"):
        sections(loss={"use": "mine.py:reinforce", "weigth": 3.0}, base_dir=tmp_path)
    with pytest.raises(RecipeError, match=r"argument weight: .*number, got 'much'"):
        sections(loss={"use": "mine.py:reinforce", "weight": "much"}, base_dir=tmp_path)
    with pytest.raises(UserError, match="no function reinforced"):
        sections(loss={"use": "mine.py:reinforced"}, base_dir=tmp_path)


def test_group_reward_is_a_component_for_gdpo() -> None:
    """kimi_length with weight 1/2 on two right rows of 3 and 1 tokens: -1/4 and + 1/4 on equal rewards."""
    rows, _ = batch([[1, 1]], [3, 1])
    objective = preset_objective("gdpo", group_rewards=[{"use": "kimi_length"}])
    assigned = objective.compute_advantages(rows.replace(components={"accuracy": rows.rewards}))
    assert assigned.components["kimi_length"].tolist() == [-0.25, 0.25]
    assert assigned.advantages is not None and assigned.advantages[0] < 0 < assigned.advantages[1]


def test_copo_excludes_rows_without_tokens_from_its_mean() -> None:
    """The mean over rows excludes an empty row, so the others weigh 1/3 instead of 1/4."""
    rows, logp = batch([[1, 0], [1, 0]], [3, 1, 2, 0], old_logp=None, answer_ids=torch.tensor([0, 1, 0, 1]))
    objective = preset_objective("copo")
    assert objective.totals(objective.compute_advantages(rows)).rows == 3
    loss, found = gradient(objective, rows, logp)
    loss_4, found_4 = gradient(preset_objective("copo", loss={"count_empty_rows": True}), rows, logp)
    assert loss == pytest.approx(loss_4 * 4 / 3)
    torch.testing.assert_close(found, found_4 * 4 / 3)
