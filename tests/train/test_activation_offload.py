"""Runs with offloaded layer inputs or with saved attention outputs equal runs without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.models import activation_offload
from posttrain.recipe.load import load_dict
from posttrain.train import preference, reward_model, rl, sft

RUNS: dict[str, Any] = {"sft": sft.run, "dpo": preference.run, "rl": rl.run, "reward_model": reward_model.run}
RL: dict[str, Any] = {
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
    "rewards": [{"use": "rewards.py:spread"}],
    "scoring": {"workers": 1},
    "batch": {"minibatches": 2, "micro_tokens": 40},
}


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        ("sft", {}),
        pytest.param("sft", {"compile": True}, marks=pytest.mark.slow),
        ("dpo", {"lora": {"rank": 4}}),
        ("rl", {"gradient_checkpointing": "selective"}),
        ("reward_model", {"lora": {"rank": 4}}),
    ],
)
def test_metrics_are_bitwise_equal_with_offloading(
    stage: str, model: Any, dpo_recipe: Any, rows_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms and all other metrics; compiled graphs run without generated code."""
    kept = list[Any]()
    inner = activation_offload._Input.__init__
    monkeypatch.setattr(activation_offload._Input, "__init__", lambda *args: (kept.append(1), inner(*args))[1])
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    if "compile" in model:
        import functools

        import torch

        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    dpo_recipe()  # writes the rows
    (tmp_path / "rewards.py").write_text("def spread(completion):\n    return sum(map(ord, completion)) % 97 / 97\n")
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "completion": f"{2 * i}"}) + "\n" for i in range(8))
    )
    found = []
    for offload in (False, True):
        own = {"path": "tiny", "gradient_checkpointing": True, "activation_offloading": offload, **model}
        if not offload and own["gradient_checkpointing"] == "selective":
            own["gradient_checkpointing"] = True
        values = {
            "stage": stage,
            "model": own,
            "data": {"source": "sums.jsonl" if stage in ("sft", "rl") else "pairs.jsonl"},
            "optim": {"lr": 1e-3},
            "run": {"steps": 2},
            **(RL if stage == "rl" else {"batch": {"size": 4, "micro_size": 2}}),
        }
        recipe = load_dict(values, base_dir=tmp_path, where="test").recipe
        found.append(rows_of(RUNS[stage], recipe, f"run-{offload}"))
        assert bool(kept) == offload
    assert found[0] == found[1] and found[0][-1]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"activation_offloading": True}, "only the inputs of checkpointed layers are offloaded"),
        ({"gradient_checkpointing": "selective", "compile": True}, "which activations a compiled layer keeps"),
    ],
)
def test_incompatible_settings_are_refused(model: Any, said: str, sft_recipe: Any) -> None:
    with pytest.raises(RecipeError, match=said):
        sft_recipe(model=model)
