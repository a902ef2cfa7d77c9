"""Invariants of advantages, factors, transforms, credit assignments and selectors in the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.batch import ChannelAdvantages, Credit, Remembered, RolloutBatch, Selection
from posttrain.recipe.needs import BY_ROW

KINDS = ("advantage", "factor", "advantage_transform", "credit_assignment", "select")
NAMES = [(kind, name) for kind in KINDS for name in sorted(registry.load_index()[kind])]
ADVANTAGES = [name for kind, name in NAMES if kind == "advantage"]
BY_ROW_ALONE = [(kind, name) for kind, name in NAMES if BY_ROW.issuperset(registry.load_index()[kind][name]["needs"])]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "riskpo": {"bundle_size": 2},
    "channels": {"channels": [{"rewards": {"step": 1.0}}, {"rewards": {"thinks": 0.5}}]},
    "decs": {"max_length": 6},
    "d3s": {"n_query": 2, "token_frac": 0.5},
    "effective_rank": {"stride": 1},
    "confidence": {"skip_all_correct": True},
    "capo": {"learning_rate": 1e-6},
    "per_turn": {"min_group": 2},
    "gigpo": {"gamma": 1.0},  # otherwise an equal final reward is discounted more in a longer trajectory
    "decoupled_turns": {"tool": "step"},
    "meta_reasoning": {"tag": "thinks", "step_reward": "step"},
}
IN_ORDER = {"riskpo", "d3s"}  # bundles are made of rows in order; ties go to the first row
RAW_ALONE = {"copo", "riskpo", "beta_norm", "meta_reasoning", "from_role"}
NO_BASELINE = {
    "reward",
    "remax",
    "batch",
    "reinforce_pp",
    "gae",
    "step_gae",
    "mc_critic",
    "extended_gae",
}  # do not compare within groups
BY_SEARCH = {"mc_actions", "tree_steps"}  # use returns of a search or of plays instead of the rows' rewards

COMPONENTS = ("step", "thinks", "necessary_prefix/start", "necessary_prefix/end")
LENGTHS = torch.tensor([4, 6, 1, 5, 2, 3, 6, 4, 0, 3, 5, 2])
MASK = torch.arange(6) < LENGTHS[:, None]
GROUPS = torch.arange(12) // 3
REWARDS = torch.tensor([1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.float64)


def batch(garbage: float = 0.0, dtype: torch.dtype = torch.float64, **changes: Any) -> RolloutBatch:
    """Return four groups of three: mixed, all right, all wrong with an empty row, mixed. Masked cells hold
    `garbage`."""
    generator = torch.Generator().manual_seed(3)

    def matrix(*depth: int) -> torch.Tensor:
        values = torch.rand(12, 6, *depth, generator=generator, dtype=torch.float64)
        mask = MASK.reshape(12, 6, *[1] * len(depth))
        return torch.where(mask, values, garbage).to(dtype)

    def numbers() -> torch.Tensor:
        return torch.rand(12, generator=generator, dtype=torch.float64).to(dtype) + 0.5

    turns = torch.arange(6).expand(12, 6) // 2
    made = RolloutBatch(
        group_ids=GROUPS,
        mask=MASK,
        rewards=REWARDS.to(dtype),
        correct=REWARDS.to(dtype),
        components={name: numbers() for name in COMPONENTS},
        columns={name: numbers()[GROUPS] for name in ("easiness", "tool_seconds")},
        truncated=torch.zeros(12, dtype=torch.bool),
        lengths=LENGTHS,
        greedy_rewards=torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=dtype)[GROUPS],
        answer_ids=torch.tensor([0, 0, 1, 2, 2, 2, -1, -1, 3, 4, 5, 4]),
        old_logp=-matrix(),
        rollout_logp=-matrix(),
        ref_logp=-matrix(),
        entropy=matrix(),
        values=matrix(),
        mc_values=matrix(),
        legal_returns=torch.stack([numbers()[GROUPS], -numbers()[GROUPS], numbers()[GROUPS] * 2], -1),
        action_ids=torch.tensor([0, 1, 2, 0, 0, 0, -1, 1, 2, 1, 1, 0]),
        hidden=matrix(4),
        topk_logp=-matrix(3),
        topk_chosen=torch.zeros(12, 6, 3, dtype=torch.bool),
        prompt_logp=-matrix(),
        prompt_mask=MASK,
        token_rewards=None,
        turn_ids=turns,
        edge_ids=turns,
        turn_states=turns,
        agent_ids=torch.arange(12) % 2,
        roles=("planner", "solver"),
        trajectory_ids=torch.arange(12),
        step_ids=torch.zeros(12, dtype=torch.long),
        part_ids=turns,
        node_ids=turns,
        node_values=matrix(),
        finished=torch.ones(12, dtype=torch.bool),
        new_tokens=torch.ones(12, 6, dtype=torch.bool),
        state_ids=torch.arange(12) % 2,
        dones=torch.ones(12, dtype=torch.bool),
        hinted=torch.arange(12) % 3 == 0,
        hint_mask=MASK & (torch.arange(6) < 2),
        bins=GROUPS % 3,
        sampler_state={"scores": {"0": 0.5, "1": 1.5}},
        advantages=torch.tensor([1, -0.5, -0.5, 0, 0, 0, 0, 0, 0, 0.5, -1, 0.5], dtype=dtype),
        memory={"effective_rank": {"er": 1.5, "erv": 0.2, "era": -0.05}},
    )
    return dataclasses.replace(made, **changes)


def with_gains(name: str, rows: RolloutBatch) -> RolloutBatch:
    """Return the batch with token-level gains if the component reads them, and without gains otherwise."""
    if rows.values is None:
        return rows
    if name == "meta_reasoning":
        return rows.replace(turn_scores={"thinks": rows.values, "step": rows.values})
    if name == "answer_gain":
        return rows.replace(answer_logp=-rows.values[:, ::2])  # before each turn of two tokens
    if name not in ("information_gain", "per_turn"):
        return rows
    return rows.replace(token_rewards=rows.values)


def outcome(kind: Any, name: str, rows: RolloutBatch) -> torch.Tensor:
    """Return the relevant tensor of a component's result."""
    found = registry.get(kind, name).function(with_gains(name, rows), **ARGUMENTS.get(name, {}))
    if isinstance(found, Remembered):
        found = found.result
    match found:
        case Credit():
            return found.advantages
        case ChannelAdvantages():
            return torch.stack([found.total, *found.channels.values()], -1)
        case Selection():
            return found.mask
    return found


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize("garbage", [7.0, float("inf"), float("nan")])
def test_masked_cells_change_nothing(kind: str, name: str, garbage: float) -> None:
    clean, dirty = outcome(kind, name, batch()), outcome(kind, name, batch(garbage))
    if clean.shape == MASK.shape:
        clean, dirty = clean[MASK], dirty[MASK]
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), BY_ROW_ALONE)
def test_components_without_token_needs_read_no_token_fields(
    kind: str, name: str, without_tokens: Callable[[RolloutBatch], RolloutBatch]
) -> None:
    """With several ranks, these components also get rows whose tokens are on other ranks, so their mask only says which
    rows have tokens."""
    whole, found = outcome(kind, name, batch()), outcome(kind, name, without_tokens(batch()))
    if kind == "select":
        whole, found = whole & MASK, found & MASK
    torch.testing.assert_close(found, whole, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_result_is_finite_and_zero_outside_the_mask(kind: str, name: str) -> None:
    found = outcome(kind, name, batch(float("nan")))
    assert found.shape[0] == 12
    assert bool(found.isfinite().all())
    if found.shape == MASK.shape and kind != "factor":
        assert not found[~MASK].any()


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_inputs_with_gradients_change_nothing(kind: str, name: str) -> None:
    rows = batch()
    for field in ("rewards", "old_logp", "entropy", "values", "advantages"):
        getattr(rows, field).requires_grad_()
    with torch.no_grad():
        plain = outcome(kind, name, batch())
    torch.testing.assert_close(outcome(kind, name, rows).detach(), plain, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_float32_is_close_to_float64(kind: str, name: str) -> None:
    single, double = outcome(kind, name, batch(dtype=torch.float32)), outcome(kind, name, batch())
    torch.testing.assert_close(single.double(), double.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [n for n in NAMES if n[1] not in IN_ORDER])
def test_the_order_of_rows_does_not_matter(kind: str, name: str) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    shuffled = outcome(kind, name, batch().select(order))
    torch.testing.assert_close(shuffled, outcome(kind, name, batch())[order])


@pytest.mark.parametrize("name", ["gae", "step_gae", "mc_critic", "extended_gae"])
def test_unscored_row_has_no_return_for_the_critic_to_learn(name: str) -> None:
    """A return of 0 would pull the critic's values towards 0 wherever a reward has no score."""
    rewards = REWARDS.clone()
    rewards[1] = torch.nan
    found = registry.get("advantage", name).function(batch(rewards=rewards))
    assert isinstance(found, Credit)
    assert bool(found.returns[1].isnan().all())
    scored = torch.arange(12) != 1
    assert bool(found.returns[scored][MASK[scored]].isfinite().all())


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n not in BY_SEARCH])
def test_unscored_row_gets_zero_and_changes_no_other_row(name: str) -> None:
    """The tokens, length and other fields of the unscored row have no influence."""
    rewards = REWARDS.clone()
    rewards[1] = torch.nan
    components = {k: torch.where(torch.arange(12) == 1, torch.nan, v) for k, v in batch().components.items()}
    rows = batch(rewards=rewards, components=components, correct=rewards)
    found = outcome("advantage", name, rows)
    assert not found[1].any()
    if name not in IN_ORDER | {"copo"}:  # copo counts the answers of unscored rows
        left = torch.arange(12) != 1
        torch.testing.assert_close(found[left], outcome("advantage", name, rows.select(left)))


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n not in NO_BASELINE | BY_SEARCH])
def test_equal_rewards_in_the_whole_batch_get_zero(name: str) -> None:
    same = torch.full((12,), 0.3, dtype=torch.float64)
    rows = batch(rewards=same, correct=torch.ones(12).double(), components=dict.fromkeys(COMPONENTS, same))
    rows = rows.replace(values=torch.zeros(12, 6).double(), lengths=torch.full((12,), 4))
    if name == "from_role":  # whose groups have calls of one role
        rows = rows.replace(agent_ids=torch.zeros(12, dtype=torch.long))
    found = outcome("advantage", name, rows)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n not in NO_BASELINE | RAW_ALONE | BY_SEARCH])
def test_a_group_of_one_gets_zero(name: str) -> None:
    """Exceptions: components that compare prompts (copo, riskpo), use 0 as the mean of a single row (beta_norm), or
    keep a single row's raw reward (meta_reasoning, from_role)."""
    rows = batch().select([0, 3, 6, 9])
    found = outcome("advantage", name, rows.replace(values=torch.zeros(4, 6).double()))
    assert not found.any()
