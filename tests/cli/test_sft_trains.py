"""`posttrain sft` with each objective on `tiny`, through the command line: three steps and a final model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CRITIQUES = Path(__file__).parents[2] / "recipes/data/critiques.py"
PEAR = {"use": "pear", "behavior_model": "tiny"}
RECIPES: dict[str, dict[str, Any]] = {
    "ce": {"objective": {"use": "ce"}},
    "dft": {"objective": {"use": "dft"}},
    **{f"pear {level}": {"objective": {**PEAR, "level": level}} for level in ("token", "block", "sequence")},
    "action_aware": {"objective": {"use": "action_aware", "action_open": "<answer>"}},
    "neftune": {"objective": {"use": "ce", "neftune": 5.0}},
    "thought_dropout": {"data": {"thought_dropout": 0.5}},
    "packing": {"batch": {"packing": True}},
    "cft": {"data": {"source": f"{CRITIQUES}:critiques", "params": {"file": "critiques.jsonl"}, "chat": False}},
    "train flags": {"data": {"source": "turns.jsonl", "train_on": "assistant"}},
}


@pytest.fixture
def rows(folder: Path) -> None:
    answers = [{"prompt": f"{i}+1", "completion": f"<think>{i}.</think><answer>{i + 1}</answer>"} for i in range(8)]
    first = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "train": False}]
    turns = [*first, {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    critique = {"question": "1+1?", "solution": "2", "critique": "Good. Conclusion: right", "correct": True}
    (folder / "critiques.jsonl").write_text((json.dumps(critique) + "\n") * 8)
    (folder / "turns.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", RECIPES)
def test_objective_trains(call: Callable[..., Any], folder: Path, name: str) -> None:
    changes = RECIPES[name]
    recipe = {
        "stage": "sft",
        "model": {"path": "tiny"},
        "batch": {"size": 4, "micro_size": 2},
        "run": {"steps": 3},
        **changes,
        "data": {"source": "rows.jsonl", **changes.get("data", {})},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 0, result.output
    steps = (next((folder / "out").rglob("metrics.jsonl"))).read_text().splitlines()
    assert len(steps) == 3
    assert list((folder / "out").rglob("model.safetensors"))
