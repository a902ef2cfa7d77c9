"""A recipe for a 7B model ships for every stage, says that we have not run it, and can be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.models import tiny
from posttrain.recipe.load import load

RECIPES = {
    "sft": "sft/qwen_gsm8k_qlora",
    "dpo": "dpo/qwen_math_preference_qlora",
    "rl": "rl/dapo_qwen_7b_math",
    "merge": "merge/qwen_7b_task_arithmetic",
    "eval": "eval/qwen_7b_math500",
}
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("stage", RECIPES)
def test_recipe_ships_and_says_that_it_was_not_run(stage: str) -> None:
    loaded = load(RECIPES[stage], stage=stage)
    assert "7B" in loaded.text and "Not run by us" in loaded.text


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_recipe_can_be_planned(stage: str, tmp_path: Path) -> None:
    """The plan needs only the config; the data are a test row, because tests download nothing."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    tiny.build(0)[1].save_pretrained(model)
    (model / "config.json").write_text(json.dumps(SHAPE))
    asked = dict.fromkeys(("question", "instruction", "problem"), "1+1")
    answered = {"answer": "2", "solution": "2", "chosen_response": "2", "rejected_response": "3"}
    rows.write_text(json.dumps({**asked, **answered}) + "\n")
    result = CliRunner().invoke(app, ["plan", RECIPES[stage], f"model.path={model}", f"data.source={rows}", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["parameters"] == pytest.approx(7.6e9, rel=0.02)
    assert found["peak_gib"] > 4
