"""Invariants of every preset of stage rl as a combination of components, whatever its formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.recipe import presets
from posttrain.recipe.stages import RlRecipe
from posttrain.train.objective import Objective
from tests.preset_objectives import preset_objective

NAMES = presets.names("rl")
F64 = torch.float64
NORMALISED = [n for n in NAMES if "groups" in preset_objective(n).advantage.needs]
# A square of a mean over the groups of one pass (disco, drpo); a mean over the tokens of one pass, which is TRL's bnpo.
BY_PASS = {
    "disco": {"loss": {"kl_beta": 0.0}},
    "drpo": {"loss": {"kl_beta": 0.0}},
    "bnpo": None,
    "guide_grpo": {"loss": {"strategy": "constant"}},
}
ROUGH = {"verl_rank"}  # singular values in float32

LENGTHS = torch.tensor([4, 6, 1, 5, 2, 3, 6, 4, 0, 3, 5, 2, 6, 1, 2])
MASK = torch.arange(6) < LENGTHS[:, None]
GROUPS = torch.arange(15) // 3
MIXED = torch.tensor(
    [1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1], dtype=F64
)  # mixed, all right, all wrong, mixed, mixed
MARKS = ("target", "easiness", "difficulty")


def batch(name: str, rewards: torch.Tensor = MIXED, garbage: float = 0.0, dtype: torch.dtype = F64) -> RolloutBatch:
    """Return five groups of three rows of uneven length, one empty; masked cells hold `garbage`."""
    generator = torch.Generator().manual_seed(5)

    def matrix(*depth: int) -> torch.Tensor:
        values = torch.rand(15, 6, *depth, generator=generator, dtype=F64)
        return torch.where(MASK.reshape(15, 6, *[1] * len(depth)), values, garbage).to(dtype)

    named = [reward.get("name") or reward["use"].rpartition(".")[2] for reward in presets.preset(name).rewards]
    parts = ["necessary_prefix/start", "necessary_prefix/end"]
    return RolloutBatch(
        group_ids=GROUPS,
        mask=MASK,
        rewards=rewards.to(dtype),
        correct=rewards.to(dtype),
        components={
            **dict.fromkeys(named or ["reward"], rewards.to(dtype)),
            **dict.fromkeys(parts, LENGTHS.to(dtype) / 2),
        },
        columns=dict.fromkeys(MARKS, (GROUPS + 1).to(dtype)),
        truncated=torch.zeros(15, dtype=torch.bool),
        lengths=LENGTHS,
        greedy_rewards=GROUPS.to(dtype) / 4,
        answer_ids=torch.where(rewards > 0.5, 0, torch.arange(15)),
        old_logp=-matrix(),
        rollout_logp=-matrix(),
        ref_logp=-matrix(),
        tempered_ref_logp=-matrix(),
        entropy=matrix(),
        values=matrix(),
        new_values=matrix(),
        hidden=matrix(4),
        topk_logp=-matrix(3).sort(-1).values,
        topk_chosen=torch.zeros(15, 6, 3, dtype=torch.bool),
        vocab_mean_logp=-matrix() - 5,
        old_vocab_mean_logp=-matrix() - 5,
        prompt_logp=-matrix(),
        prompt_mask=MASK,
        bins=GROUPS % 3,
        sampler_state={"scores": {"0": 0.5, "1": -0.5}, "kl_threshold": 0.2},
        trajectory_ids=GROUPS * 2 + torch.arange(15) % 3 // 2,  # two a group, the first of two rows
        step_ids=torch.arange(15) % 3,
        agent_ids=torch.zeros(15, dtype=torch.long),
        roles=("planner",),
        finished=torch.ones(15, dtype=torch.bool),
        new_tokens=torch.ones(15, 6, dtype=torch.bool),
        part_ids=torch.arange(6).expand(15, 6) // 3,  # tokens of two budgets
        turn_ids=torch.arange(6).expand(15, 6) // 2,
        legal_returns=torch.stack([GROUPS + 1.0, -(GROUPS + 1.0), GROUPS * 0.5], -1).to(dtype),
        action_ids=torch.arange(15) % 3,
        answer_logp=-torch.rand(15, 4, generator=generator, dtype=F64).to(dtype),  # before three turns, and after
        node_ids=torch.arange(6).expand(15, 6) // 2,
        node_values=matrix(),
        hinted=torch.arange(15) % 3 == 0,
        hint_mask=MASK & (torch.arange(6) < 1) & (torch.arange(15) % 3 == 0)[:, None],
        external=MASK & (torch.arange(15) % 3 == 2)[:, None],
        expert_logp=-matrix(),
        new_entropy=matrix(),
        masked_logp=-matrix(),
        perturbed_logp=-matrix(),
        step=1,
        total_steps=4,
    )


def policy(garbage: float = 0.0, dtype: torch.dtype = F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    values = torch.where(MASK, -torch.rand(15, 6, generator=generator, dtype=F64), garbage)
    return values.to(dtype).requires_grad_()


def objective_of(name: str, **changes: Any) -> Objective:
    smaller = {"riskpo": {"advantage": {"bundle_size": 5}}, "pass_k_training": {"advantage": {"k": 2}}}.get(name, {})
    return preset_objective(name, **{"rollout": {"max_new_tokens": 6}, **smaller, **changes})


def gradient(objective: Objective, rows: RolloutBatch, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assigned = objective.compute_advantages(rows)
    loss, _ = objective.loss(assigned, logp, objective.totals(assigned))
    (found,) = torch.autograd.grad(loss, logp)
    return loss.detach(), found


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_finite_and_not_zero(name: str) -> None:
    _, found = gradient(objective_of(name), batch(name), policy())
    assert found.isfinite().all() and found.any()
    assert not found[~MASK].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_masked_cells_change_nothing(name: str, garbage: float) -> None:
    clean = gradient(objective_of(name), batch(name), policy())
    dirty = gradient(objective_of(name), batch(name, garbage=garbage), policy(garbage))
    torch.testing.assert_close(dirty, clean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_sum_over_micro_batches_equals_whole_batch(name: str) -> None:
    """Micro-batches of whole groups, in any number, sum to the whole: loss, gradient and statistics."""
    changes = BY_PASS.get(name, {})
    if changes is None:
        pytest.skip("it is defined by the micro-batch")
    objective = objective_of(name, **changes)
    logp = policy()
    assigned = objective.compute_advantages(batch(name))
    totals = objective.totals(assigned)
    whole, stats = objective.loss(assigned, logp, totals)
    (expected,) = torch.autograd.grad(whole, logp)
    logp = policy()
    parts = [list(range(3)), list(range(3, 9)), list(range(9, 15))]
    found = [objective.loss(assigned.select(part), logp[part], totals) for part in parts]
    loss = sum((part for part, _ in found), torch.zeros((), dtype=F64))
    torch.testing.assert_close(loss.detach(), whole.detach(), check_dtype=False)
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], expected)
    for key, value in stats.items():
        if not key.endswith("/kl") or not objective.whole_groups:
            torch.testing.assert_close(sum(s.get(key, 0.0) for _, s in found), value, check_dtype=False)


UNEQUAL = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 4])
EQUAL_ONLY = {name for name in NAMES if any("equal_groups" in part.needs for part in objective_of(name).every_part)}
TIES = {"d3s"}  # breaks ties between rows and tokens by order


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_different_sizes_with_interleaved_rows(name: str) -> None:
    """Groups of 2, 4, 3, 5 and 1 rows; with permuted rows, loss and gradient are permuted alike. Presets that need
    equal groups declare it (`equal_groups`) and raise."""
    states = torch.stack([UNEQUAL + 1.0, -(UNEQUAL + 1.0), UNEQUAL * 0.5], -1).to(F64)
    marks = dict.fromkeys(MARKS, (UNEQUAL + 1).to(F64))
    rows = batch(name).replace(group_ids=UNEQUAL, columns=marks, legal_returns=states)
    objective, logp = objective_of(name), policy()
    if name in EQUAL_ONLY:
        with pytest.raises(UserError, match="groups of sizes"):
            objective.compute_advantages(rows)
        return
    loss, found = gradient(objective, rows, logp)
    assert found.isfinite().all() and found.any()
    order = torch.randperm(15, generator=torch.Generator().manual_seed(3))
    moved = logp.detach()[order].requires_grad_()
    other, theirs = gradient(objective, rows.select(order).replace(reward_weights=rows.reward_weights), moved)
    if name not in TIES:
        rough = 1e-5 if name in ROUGH else 1e-12
        torch.testing.assert_close(other, loss, rtol=rough, atol=rough)
        torch.testing.assert_close(theirs, found[order], rtol=rough, atol=rough)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_signal_have_no_gradient(name: str) -> None:
    """Such rows are never passed through the model, so they must not need a gradient."""
    objective = objective_of(name)
    assigned = objective.compute_advantages(batch(name))
    logp = policy()
    loss, _ = objective.loss(assigned, logp, objective.totals(assigned))
    (found,) = torch.autograd.grad(loss, logp)
    assert not found[~objective.has_signal(assigned)].any()
    active = objective.has_signal(assigned)
    part = assigned.select(active)
    again, _ = objective.loss(part, logp[active], objective.totals(assigned))
    if name != "bnpo":
        torch.testing.assert_close(torch.autograd.grad(again, logp)[0], found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rewards", [torch.ones(15), torch.zeros(15), torch.full((15,), float("nan"))], ids=["1", "0", "nan"]
)
def test_equal_or_missing_rewards_give_finite_losses(name: str, rewards: torch.Tensor) -> None:
    rows = batch(name, rewards.to(F64))
    if rewards.isnan().any():
        rows = rows.replace(correct=torch.zeros(15, dtype=F64))  # filters need correctness
    loss, found = gradient(objective_of(name), rows, policy())
    assert loss.isfinite() and found.isfinite().all()


@pytest.mark.parametrize("name", NORMALISED)
def test_groups_of_one_get_zero(name: str) -> None:
    """If the baseline is the group's, a single row is its own baseline. (COPO compares prompts as well.)"""
    objective = dataclasses.replace(objective_of(name), keep=(), advantage_transforms=(), group_rewards=())
    rows = batch(name).replace(
        group_ids=torch.arange(15), answer_logp=torch.zeros(15, 4)
    )  # turns of a row are compared
    advantages = objective.compute_advantages(rows).advantages
    assert advantages is not None and advantages.isfinite().all()
    alone = ("coda", "search_self_play", "mc_grpo")  # a single row keeps its reward, or is compared with other actions
    if name not in (
        "copo",
        "riskpo",
        "bnpo_beta",
        *alone,
    ):  # bundles of prompts; a group of one has p = 0 in its source
        assert not advantages.any()


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_close_to_float64(name: str) -> None:
    single = gradient(objective_of(name), batch(name, dtype=torch.float32), policy(dtype=torch.float32))
    double = gradient(objective_of(name), batch(name), policy())
    size = float(double[1].abs().max())
    rough = 1e-2 if name in ROUGH else 2e-4
    torch.testing.assert_close(single[1].double(), double[1], rtol=rough, atol=rough * max(size, 1e-6))


@pytest.mark.parametrize("name", NAMES)
def test_preset_describes_its_choices(name: str) -> None:
    found = presets.preset(name)
    assert found.title and found.purpose and found.not_stated and found.stage == "rl"
    assert {"loss", "kl"} <= found.choices.keys() | {"kl"}


def parts_objective(**sections: Any) -> Objective:
    values = {"model": {"path": "tiny"}, "data": {"source": "x"}, "rewards": [{"use": "x"}]}
    return Objective.from_recipe(RlRecipe.model_validate({**values, "rollout": {"max_new_tokens": 6}, **sections}))


LOSSES = [
    (name, entry["needs"])
    for kind in ("loss", "group_loss")
    for name, entry in registry.load_index()[kind].items()
    if "external" not in entry["needs"]
]


@pytest.mark.parametrize(("name", "needs"), LOSSES, ids=[name for name, _ in LOSSES])
def test_losses_without_advantages_declare_own_credit(name: str, needs: list[str]) -> None:
    """`own_credit`: advantages in the recipe are then refused as unused (recipe/objective_checks.py)."""
    copies = {name: -torch.rand(15, 6).double() for name in ("opponent_logp", "prox_logp")}
    rows = batch("grpo").replace(turn_ids=torch.arange(6).expand(15, 6) // 2, **copies)
    advantage = torch.linspace(-1, 1, 15, dtype=F64)
    found = []
    for factor in (1.0, 3.0):
        given = rows.replace(advantages=factor * advantage, channels={"0": factor * advantage})
        logp = policy()
        values = registry.get("group_loss" if name in registry.load_index()["group_loss"] else "loss", name).function(
            given.replace(new_values=given.new_values.clone().requires_grad_()), logp
        )
        found.append(values.values.sum().detach())
    assert bool(found[0] == found[1]) == ("own_credit" in needs)


@pytest.mark.parametrize(
    "name", [n for n, e in registry.load_index()["advantage"].items() if "components" in e["needs"]]
)
def test_component_advantages_ignore_a_kl_in_the_reward(name: str) -> None:
    given = {"channels": {"channels": [{"rewards": {"reward": 1.0}}]}, "decs": {"max_length": 6.0}}.get(name, {})
    rows = batch("decs").replace(components={**batch("decs").components, "reward": MIXED})
    kl = {"use": "k1", "coef": 0.5, "where": "reward"}
    plain, less = (
        parts_objective(advantage={"use": name, **given}, **k).compute_advantages(rows) for k in ({}, {"kl": kl})
    )
    torch.testing.assert_close(less.advantages, plain.advantages)
