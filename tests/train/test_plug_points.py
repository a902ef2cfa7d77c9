"""Plug points of the objective: hand-computed order, effect of selections on denominators, and losses over groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.recipe.stages import RlRecipe
from posttrain.train.controls import Controls
from posttrain.train.logprobs import micro_batches
from posttrain.train.objective import Objective
from posttrain.train.update import minibatches
from tests.preset_objectives import preset_objective

F64 = torch.float64

PARTS = """
import torch
from posttrain.batch import ChannelAdvantages, Correction, Credit, GroupLoss, Remembered, Selection, TokenLoss

def note(batch, word):
    return {**batch.memory, "calls": [*batch.memory.get("calls", []), word]}

def double(batch):
    return batch.rewards * 2

def first_two(batch):
    return torch.arange(len(batch)) < 2

def as_rewards(batch):
    return batch.rewards

def parted(batch):
    one = torch.ones_like(batch.rewards)
    return ChannelAdvantages(3 * one, {"a": one, "b": 2 * one})

def half(batch, *, by: float = 0.5):
    return torch.full_like(batch.advantages, by)

def by_place(batch):
    return torch.arange(1, batch.mask.shape[1] + 1).expand_as(batch.mask).to(batch.advantages)

def plus(batch, *, amount: float = 1.0):
    return batch.advantages + amount

def to_first_token(batch):
    first = batch.mask & (batch.mask.long().cumsum(-1) == 1)
    return torch.where(first, batch.advantages[:, None], 0.0)

def first_token(batch, *, denominator: str = "all"):
    return Selection(batch.mask & (batch.mask.long().cumsum(-1) == 1), denominator)

def counting(batch):
    return Remembered(batch.rewards * 0 + 1, {"steps": batch.memory.get("mine.py:counting", {}).get("steps", 0) + 1})

def linear(batch, logp):
    advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
    return TokenLoss(torch.where(batch.mask, -advantages * logp, 0.0), {})

def triple(batch, logp):
    assert not logp.requires_grad
    return Correction(torch.full_like(logp, 3.0), batch.mask & (torch.arange(logp.shape[1]) == 0), {})

def pull(batch, logp):
    return TokenLoss(torch.where(batch.mask, logp, 0.0), {})

def own_mean(batch, logp):
    first = batch.mask & (torch.arange(logp.shape[1]) == 0)
    return TokenLoss(torch.where(first, logp, 0.0), {}, counted=first)
"""


@pytest.fixture
def objective(tmp_path: Path) -> Any:
    """Return an objective of the functions above: linear loss, advantages equal rewards; keyword arguments change
    sections."""
    (tmp_path / "mine.py").write_text(PARTS)

    def make(**changes: Any) -> Objective:
        recipe = RlRecipe.model_validate(
            {
                "model": {"path": "tiny"},
                "data": {"source": "x"},
                "rewards": [{"use": "x"}],
                "advantage": "mine.py:as_rewards",
                "loss": {"use": "mine.py:linear", "aggregation": "token_mean"},
                **changes,
            }
        )
        recipe._base_dir = tmp_path
        return Objective.from_recipe(recipe)

    return make


def rows() -> tuple[RolloutBatch, torch.Tensor]:
    """Return rewards 1, 2, 3 in one group and 4 in another; 2, 1, 2, 2 tokens."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]], dtype=torch.bool)
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0, 0, 1]), mask=mask, rewards=torch.tensor([1.0, 2, 3, 4], dtype=F64)
    )
    return batch, torch.zeros(4, 2, dtype=F64, requires_grad=True)


def gradient(objective: Objective) -> tuple[RolloutBatch, torch.Tensor]:
    batch, logp = rows()
    assigned = objective.compute_advantages(batch)
    loss, _ = objective.loss(assigned, logp, objective.totals(assigned))
    return assigned, torch.autograd.grad(loss, logp)[0]


def test_plug_points_apply_in_order_from_rewards_to_tokens(objective: Any) -> None:
    """Rewards 1, 2 (others dropped), doubled to 2, 4, halved, plus 1: 2, 3; all of it at the first token. 3 tokens."""
    made = objective(
        group_rewards=["mine.py:double"],
        keep="mine.py:first_two",
        factors=["mine.py:half"],
        advantage_transforms=["mine.py:plus"],
        credit_assignment="mine.py:to_first_token",
    )
    assigned, found = gradient(made)
    assert assigned.rewards.tolist() == [2, 4, 6, 8]
    assert assigned.keep.tolist() == [True, True, False, False]
    assert assigned.advantages.tolist() == [[2, 0], [3, 0], [0, 0], [0, 0]]
    torch.testing.assert_close(found, -assigned.advantages / 3)


def test_token_factor_weights_row_advantages(objective: Any) -> None:
    """Rewards 1 to 4, once at the first token and twice at the second; 7 tokens are trained on."""
    assigned, found = gradient(objective(factors=["mine.py:by_place"]))
    assert assigned.advantages.tolist() == [[1, 2], [2, 4], [3, 6], [4, 8]]
    torch.testing.assert_close(found, -assigned.advantages * rows()[0].mask.to(F64) / 7)


def test_factor_weights_every_channel(objective: Any) -> None:
    """-A logp of each of two channels, 1 and 2 a row, all halved: -1.5 a token of 7."""
    made = objective(
        advantage="mine.py:parted", factors=["mine.py:half"], loss={"use": "clip_channels", "aggregation": "token_mean"}
    )
    assigned, found = gradient(made)
    assert assigned.advantages.tolist() == [1.5] * 4
    torch.testing.assert_close(found, -1.5 * rows()[0].mask.to(F64) / 7)


@pytest.mark.parametrize(("denominator", "tokens"), [("all", 7), ("kept", 4)])
def test_selection_sets_the_denominator(objective: Any, denominator: str, tokens: int) -> None:
    """Only first tokens have the policy loss, over all 7 tokens or over the 4 selected; the regularizer of 0.5 has its
    own mean."""
    select = [{"use": "mine.py:first_token", "denominator": denominator}]
    assigned, found = gradient(objective(select=select))
    expected = torch.zeros(4, 2, dtype=F64)
    expected[:, 0] = -torch.tensor([1.0, 2, 3, 4]) / tokens
    torch.testing.assert_close(found, expected)
    pulled = objective(select=select, regularisers=[{"use": "mine.py:pull", "coef": 7.0}])
    assigned, found = gradient(pulled)
    everywhere = rows()[0].mask if denominator == "all" else assigned.mask
    torch.testing.assert_close(found, expected + 7.0 * everywhere / tokens)


def test_correction_changes_only_the_policy_term(objective: Any) -> None:
    """Weight 3 on first tokens, second tokens lose their policy term; the regularizer of 1 stays on all 7 tokens."""
    _, found = gradient(objective(corrections=["mine.py:triple"], regularisers=[{"use": "mine.py:pull", "coef": 1.0}]))
    expected = rows()[0].mask.to(F64)
    expected[:, 0] -= 3 * torch.tensor([1.0, 2, 3, 4])
    torch.testing.assert_close(found, expected / 7)


def test_term_with_its_own_mean(objective: Any) -> None:
    """2 * mean over the 4 first tokens: 1/2 each, whatever the recipe's aggregation, in one or two micro-batches."""
    made = objective(
        regularisers=[{"use": "mine.py:own_mean", "coef": 2.0}], factors=[{"use": "mine.py:half", "by": 0.0}]
    )
    batch, logp = rows()
    assigned = made.compute_advantages(batch)
    totals = made.totals(assigned)
    whole, _ = made.loss(assigned, logp, totals)
    parts = [made.loss(assigned.select(part), logp[part], totals)[0] for part in ([0, 1, 2], [3])]
    expected = torch.tensor([[0.5, 0.0]] * 4, dtype=F64)
    torch.testing.assert_close(torch.autograd.grad(whole, logp)[0], expected)
    torch.testing.assert_close(torch.autograd.grad(parts[0] + parts[1], logp)[0], expected)


def test_component_memory_is_returned_in_the_next_step(objective: Any) -> None:
    made = objective(advantage_transforms=["mine.py:counting"])
    batch, _ = rows()
    first = made.compute_advantages(batch)
    assert first.memory == {"mine.py:counting": {"steps": 1}}
    assert made.compute_advantages(batch.replace(memory=first.memory)).memory == {"mine.py:counting": {"steps": 2}}


def test_controllers_change_only_their_numbers(objective: Any) -> None:
    made = objective(factors=["mine.py:half", {"use": "mine.py:half", "by": 2.0}], kl={"use": "k2", "coef": 0.1})
    changed = made.at({"factors.1.by": 3.0, "kl.coef": 0.5})
    assert [part.params for part in changed.factors] == [{}, {"by": 3.0}]
    assert changed.kl is not None and changed.kl.coef == 0.5
    assert made.factors[1].params == {"by": 2.0} and made.kl.coef == 0.1
    assert changed.surrogate == made.surrogate


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ({"use": "mine.py:Kept", "slop": 1}, "has no argument slop.*it takes: slope.*did you mean `slope`"),
        ({"use": "mine.py:Kept"}, "needs the argument slope"),
        ({"use": "mine.py:half", "by": 1}, "has no method `start`"),
        ({"use": "mine.py:nothing"}, "has no function nothing"),
        ({"use": "broken.py:Kept"}, "broken.py cannot be imported: ValueError: at import"),
    ],
)
def test_invalid_controller_raises_before_the_model_is_loaded(
    use: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.train import rl, sharding

    kept = "class Kept:\n    def __init__(self, *, slope: float): ...\n\ndef half(*, by): return by\n"
    (tmp_path / "mine.py").write_text(kept, encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise ValueError('at import')\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n', encoding="utf-8")
    values = {"stage": "rl", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "kl": {"coef": 0.1},
              "rewards": [{"use": "math.accuracy"}], "run": {"steps": 1}, "controllers": {"kl.coef": use}}  # fmt: skip
    loaded = load_dict(values, base_dir=tmp_path, where="recipe")
    monkeypatch.setattr(sharding, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with (
        RunDirectory.open(tmp_path / "run", name="r", text="", resolved=loaded.resolved) as directory,
        pytest.raises(UserError, match=f"(?s){told}"),
    ):
        rl.run(loaded.require(RlRecipe), directory)


def test_controlled_coefficient_of_0_keeps_its_term() -> None:
    recipe = RlRecipe.model_validate(
        {
            "model": {"path": "tiny"},
            "data": {"source": "x"},
            "rewards": [{"use": "x"}],
            "controllers": {"kl.coef": {"use": "grpo_d", "low": 0.0, "high": 0.02}},
        }
    )
    controls = Controls.from_recipe(recipe, steps=10)
    assert Objective.from_recipe(recipe).kl is not None
    assert controls.numbers(controls.start(), 0) == {"kl.coef": 0.01}
    assert controls.numbers(controls.start(), 10) == {"kl.coef": 0.02}


def test_token_mask_with_a_group_loss_is_refused() -> None:
    """The mask would have no effect."""
    batch, _ = rows()
    objective = preset_objective("copg", select=[{"use": "high_entropy_tokens"}])
    with pytest.raises(UserError, match="`copg` has one value per group"):
        objective.compute_advantages(batch.replace(entropy=torch.zeros(4, 2)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("disco", {"kl_beta": 0.0}),  # its penalty, and DRPO's, is the square of a mean over the groups of one pass
        ("drpo", {"kl_beta": 0.0}),
        *((name, {}) for name in ("pacs", "trpa", "copg", "p3o")),
    ],
)
def test_group_losses_sum_over_whole_groups(name: str, changes: dict[str, float]) -> None:
    """Two parts of whole groups sum to the whole: loss and gradient, for groups of different size."""
    objective = preset_objective(name, loss=changes)
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    right = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0, 0], dtype=F64)
    mask = torch.arange(4) < torch.tensor([4, 1, 2, 3, 0, 2, 4, 1, 1])[:, None]
    draw = [-torch.rand(9, 4, generator=generator, dtype=F64) for _ in range(3)]
    batch = RolloutBatch(
        group_ids=ids, mask=mask, rewards=right, correct=right, lengths=mask.sum(-1), old_logp=draw[0], ref_logp=draw[1]
    )
    logp = draw[2].requires_grad_()
    assert objective.whole_groups
    assigned = objective.compute_advantages(batch)
    totals = objective.totals(assigned)
    whole, _ = objective.loss(assigned, logp, totals)
    parts = [
        objective.loss(assigned.select(part), logp[part], totals)[0] for part in (list(range(5)), list(range(5, 9)))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    (expected,) = torch.autograd.grad(whole, logp, retain_graph=True)
    (found,) = torch.autograd.grad(parts[0] + parts[1], logp)
    torch.testing.assert_close(found, expected)
    assert expected.isfinite().all() and expected.any() and not expected[~mask].any()


def test_minibatches_keep_groups_whole() -> None:
    groups = torch.tensor([5, 5, 7, 7, 7])
    parts = minibatches(groups, 4, seed=0, whole=True)
    assert sorted(map(tuple, parts)) == [(0, 1), (2, 3, 4)]


def test_micro_batches_keep_groups_whole() -> None:
    """Lengths 3, 1 | 2, 2 | 9. The group of the 9 is alone; the others are 8 tokens together, 12 when padded."""
    lengths, groups = [3, 1, 2, 2, 9], [0, 0, 1, 1, 2]
    assert micro_batches(lengths, 8, packed=True, groups=groups) == [[4], [0, 1, 2, 3]]
    assert micro_batches(lengths, 8, packed=False, groups=groups) == [[4], [0, 1], [2, 3]]
    assert micro_batches(lengths, 12, packed=False, groups=groups) == [[4], [0, 1, 2, 3]]
