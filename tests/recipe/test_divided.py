"""Combinations with `model.parallel`, `model.compile` and `model.offload_reference` that are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.load import load_dict

BASE: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "x"},
    "rewards": [{"use": "math.accuracy"}],
    "run": {"steps": 1},
}


@pytest.mark.parametrize(
    ("model", "others", "told"),
    [
        ({"shard": True, "parallel": {}}, {}, "model.parallel: model.shard is short for it"),
        (
            {"parallel": {"tensor": 2}, "lora": {}, "quantize": "nf4"},
            {},
            "model.parallel: 4-bit weights are packed into one row",
        ),
        (
            {"parallel": {"tensor": 2}, "gradient_checkpointing": "selective"},
            {},
            "model.gradient_checkpointing: keeping attention outputs",
        ),
        ({"shard": True}, {"optim": {"use": "adamw_8bit"}}, "optim.use: 8-bit moments have one scale per block of 256"),
        ({"parallel": {"context": 2}, "compile": True}, {}, "model.compile: compiled layers are untested with context"),
        ({"shard": True, "offload_reference": True}, {}, "model.parallel divides the reference as well"),
        (
            {"parallel": {"context": 2}},
            {"stage": "sft", "rewards": None},
            "parallel.context: context parallelism divides packed",
        ),
        (
            {"parallel": {"tensor": 2}},
            {"kl": {"use": "full", "coef": 1.0}},
            "model.parallel.tensor: `full` compares whole vocabularies",
        ),
        ({"parallel": {"tensor": 2, "expert": 2}}, {}, "model.parallel.expert: both are tested with `shard`"),
        ({"parallel": {"expert": 2}, "compile": True}, {}, "model.compile: the number of tokens of an expert"),
        ({"compile": True, "lora": {}, "quantize": "nf4"}, {}, "model.compile: 4-bit weights"),
        ({"offload_reference": True, "lora": {}}, {}, "under LoRA the reference is the base itself"),
    ],
)
def test_incompatible_settings_are_refused(model: dict[str, Any], others: dict[str, Any], told: str) -> None:
    values = {**BASE, **others, "model": {"path": "tiny", **model}}
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(RecipeError) as error:
        load_dict(values, base_dir=Path.cwd(), where="r")
    assert told in str(error.value)


def test_settings_unused_by_the_stage_are_refused() -> None:
    values = {
        "stage": "sft",
        "model": {"path": "tiny", "offload_reference": True},
        "data": {"source": "x"},
        "run": {"steps": 1},
    }
    with pytest.raises(RecipeError, match="only rl keeps a copy of the starting policy"):
        load_dict(values, base_dir=Path.cwd(), where="r")


def test_parallel_settings_with_one_process_are_refused() -> None:
    from posttrain.recipe.sections import Model
    from posttrain.train import sharding

    with pytest.raises(RecipeError, match="this is one") as told:
        sharding.check(Model(path="tiny", shard=True))
    assert "--gpus N" in str(told.value)
