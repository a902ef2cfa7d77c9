"""Muon for matrices of layers, with AdamW for other weights: compared with torch's, and in runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from posttrain.errors import ModelError, RecipeError
from posttrain.models import tiny
from posttrain.recipe.training_sections import Optim
from posttrain.train import optim, preference, rl, sft
from posttrain.train.optimizers import layer_matrices

SECTION = Optim(use="muon", lr=2e-3, weight_decay=0.1, momentum=0.9)


def test_updates_equal_torchs_muon_and_adamw() -> None:
    """Matrices of the layers by Muon; embeddings (tied to the head) with weight decay and norms without, by AdamW. The
    schedule applies to both. Then the size of each kind's update follows lr: 0.2 lr per weight by Muon."""
    model: Any = tiny.build(0)[0]
    other: Any = tiny.build(0)[0]
    inside = {n: p for n, p in other.named_parameters() if ".layers." in n and p.ndim == 2}
    outside = [p for n, p in other.named_parameters() if n not in inside]
    muon = Muon(inside.values(), lr=2e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(
        [
            {"params": [p for p in outside if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in outside if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=2e-3,
    )
    optimizer = optim.build(model, SECTION)
    assert len(layer_matrices(model)) == len(inside) == 7 * model.config.num_hidden_layers
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=draw)
            same.grad = one.grad.clone()
        rate = optim.set_lr(optimizer, SECTION.model_copy(update={"schedule": "linear"}), step, 8)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        optimizer.step()
        muon.step()
        adamw.step()
        for (name, one), same in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(one, same), name
            if name in inside:
                moved = one.detach() - before[name] * (1 - 0.1 * rate)
                assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * rate, rel=0.35), name


RUNS: dict[str, Any] = {"sft": sft.run, "dpo": preference.run}


@pytest.mark.parametrize("stage", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_run_resumes_exactly(stage: str, sft_recipe: Any, dpo_recipe: Any, rows_of: Any) -> None:
    make = {"sft": sft_recipe, "dpo": dpo_recipe}[stage]
    settings: dict[str, Any] = {"optim": {"use": "muon", "lr": 1e-3}}
    straight = rows_of(RUNS[stage], make(**settings, run={"steps": 4}), "straight")
    assert straight[-1]["loss"] < straight[0]["loss"]
    rows_of(RUNS[stage], make(**settings, run={"steps": 2}), "stopped")
    assert rows_of(RUNS[stage], make(**settings, run={"steps": 4}), "stopped", resume=True) == straight


@pytest.mark.slow
def test_rl_with_muon_and_a_critic_resumes_exactly(dpo_recipe: Any, rows_of: Any, tmp_path: Any) -> None:
    from posttrain.recipe.load import load_dict

    dpo_recipe()  # writes the rows
    (tmp_path / "rewards.py").write_text("def spread(completion):\n    return sum(map(ord, completion)) % 97 / 97\n")

    def recipe(steps: int) -> Any:
        values = {
            "stage": "rl", "model": {"path": "tiny"}, "data": {"source": "pairs.jsonl"}, "advantage": "gae",
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
            "rewards": [{"use": "rewards.py:spread"}], "scoring": {"workers": 1}, "batch": {"minibatches": 2},
            "optim": {"use": "muon", "lr": 1e-4}, "run": {"steps": steps, "save_every": 2},
        }  # fmt: skip
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    whole = rows_of(rl.run, recipe(4), "whole")
    rows_of(rl.run, recipe(2), "broken")
    assert rows_of(rl.run, recipe(4), "broken", resume=True) == whole
    assert all(row["updates"] == 2 for row in whole)


@pytest.mark.parametrize(
    ("model", "optimizer", "said"),
    [
        ({"lora": {"rank": 2}}, {}, "an adapter trains two factors"),
        ({"shard": True}, {}, "Muon needs a whole matrix"),
        ({"dtype": "bfloat16", "half_weights": True}, {}, "Muon is untested with model.half_weights"),
        ({}, {"offload": True}, "optim.offload: it is for AdamW in float32"),
        ({}, {"use": "adamw", "momentum": 0.8}, "optim.momentum: does nothing with adamw"),
    ],
)
def test_incompatible_settings_are_refused(model: Any, optimizer: Any, said: str, sft_recipe: Any) -> None:
    with pytest.raises(RecipeError, match=said):
        sft_recipe(model={"path": "tiny", **model}, optim={"use": "muon", **optimizer})


def test_model_without_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear does not say which of its modules are layers"):
        optim.build(nn.Linear(2, 2), Optim(use="muon"))
