"""Full training with bfloat16 weights and float32 master weights in the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from posttrain.errors import RecipeError
from posttrain.models.precision import keep_half_weights
from posttrain.recipe.training_sections import Optim
from posttrain.train import optim, preference, rl, sft

HALF = {"path": "tiny", "dtype": "bfloat16", "half_weights": True}


def small() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).bfloat16()
    keep_half_weights(layer)
    return layer


def test_updates_below_bfloat16_resolution_accumulate() -> None:
    """lr 1e-4 per step on weights near 1/2, where neighboring bfloat16 numbers are 1/512 apart: ten steps are
    visible."""
    layer = small()
    with torch.no_grad():
        layer.weight.fill_(0.5)
    optimizer = optim.build(layer, Optim(lr=1e-4, weight_decay=0.0))
    for _ in range(9):
        (layer.weight.sum() * 3).backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
        assert layer.weight.grad is None
    assert bool((layer.weight == 0.5).all()), "not yet"
    for _ in range(6):
        (layer.weight.sum() * 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    master = optim.state_dict_with_masters(optimizer, layer)
    assert master is not None and master["weight"].dtype == torch.float32
    assert float(master["weight"][0, 0]) == pytest.approx(0.5 - 15e-4, abs=1e-6)
    assert torch.equal(layer.weight, master["weight"].bfloat16()) and bool((layer.weight < 0.5).all())


def test_gradients_of_micro_batches_accumulate_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    layer = small()
    for factor in (256.0, 1.0):
        (layer.bias.sum() * factor).backward()
    assert layer.bias.grad is not None and layer.bias.grad.tolist() == [257.0, 257.0]


RUNS: dict[str, Any] = {"sft": sft.run, "dpo": preference.run}


@pytest.mark.parametrize("stage", RUNS)
def test_run_resumes_exactly_and_is_close_to_float32(
    stage: str, sft_recipe: Any, dpo_recipe: Any, rows_of: Any, tmp_path: Path
) -> None:
    """The checkpoint holds the master weights; `final` is in bfloat16, as without the key."""
    make, run = {"sft": sft_recipe, "dpo": dpo_recipe}[stage], RUNS[stage]
    whole = rows_of(run, make(model=HALF, run={"steps": 6, "save_every": 3, "keep_checkpoints": 5}), "whole")
    rows_of(run, make(model=HALF, run={"steps": 3, "save_every": 3}), "broken")
    assert rows_of(run, make(model=HALF, run={"steps": 6, "save_every": 3}), "broken", resume=True) == whole
    stored = load_file(tmp_path / "whole/checkpoints/step-00000003/model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in stored.values()), "masters, not weights"
    final = [load_file(tmp_path / name / "final/model.safetensors") for name in ("whole", "broken")]
    assert {value.dtype for value in final[0].values()} == {torch.bfloat16}
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])
    exact = rows_of(run, make(model={**HALF, "half_weights": False}), "float32")
    for row, wanted in zip(whole, exact, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=0.02, abs=2e-3)
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)


def test_rl_samples_with_rounded_weights_and_resumes_exactly(tmp_path: Path, rows_of: Any) -> None:
    from posttrain.recipe.load import load_dict

    (tmp_path / "rewards.py").write_text("def spread(completion):\n    return sum(map(ord, completion)) % 97 / 97\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"prompt": "{i}+{i}="}}' for i in range(8)))
    base: dict[str, Any] = {
        "stage": "rl", "model": HALF, "data": {"source": "rows.jsonl"}, "kl": {"coef": 0.01},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "rewards": [{"use": "rewards.py:spread"}], "scoring": {"workers": 1}, "batch": {"minibatches": 2},
        "optim": {"lr": 1e-4},
    }  # fmt: skip

    def recipe(**run: Any) -> Any:
        return load_dict({**base, "run": run}, base_dir=tmp_path, where="test").recipe

    whole = rows_of(rl.run, recipe(steps=4, save_every=2), "whole")
    assert all(row["updates"] == 2 and row["grad_norm"] > 0 for row in whole)
    rows_of(rl.run, recipe(steps=2, save_every=2), "broken")
    assert rows_of(rl.run, recipe(steps=4, save_every=2), "broken", resume=True) == whole


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ({"lora": {"rank": 2}}, {}, "an adapter's weights are few"),
        ({"shard": True}, {}, "a divided model computes in bfloat16"),
        ({"dtype": "float16"}, {}, "model.dtype is float16"),
        ({}, {"optim": {"use": "adamw_8bit"}}, "8-bit moments are untested"),
    ],
)
def test_incompatible_settings_are_refused(model: Any, more: Any, said: str, sft_recipe: Any) -> None:
    with pytest.raises(RecipeError, match=said):
        sft_recipe(model={**HALF, **model}, **more)


def test_float32_products_are_refused(sft_recipe: Any, rows_of: Any) -> None:
    with pytest.raises(RecipeError, match="half_weights needs matmuls in bfloat16"):
        rows_of(sft.run, sft_recipe(model={"path": "tiny", "half_weights": True, "device": "cpu"}))
