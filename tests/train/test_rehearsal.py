"""Rehearsal: a failing user function is reported with its line before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt
from posttrain.errors import RecipeError
from posttrain.recipe.load import load_dict
from posttrain.train.objective import Objective
from posttrain.train.objective_dry_run import dry_run

BROKEN = """
def loss(batch, logp):
    return batch.ref_logp.sum()

def none(batch, logp):
    raise KeyError
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("loss", r"mine\.py:3  AttributeError: 'NoneType' .*\n  hint: a batch carries `ref_logp`"),
        ("none", r"mine\.py:6  KeyError"),
    ],
)
def test_failing_user_function_is_reported_with_its_line(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    values: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rewards": [{"use": "math.accuracy"}],
        "loss": f"mine.py:{name}",
        "rollout": {"prompts_per_step": 1, "group_size": 2},
        "run": {"steps": 1},
    }
    recipe: Any = load_dict(values, base_dir=tmp_path, where="r.yaml").recipe
    with pytest.raises(RecipeError, match=told):
        dry_run(Objective.from_recipe(recipe), recipe, [Prompt("a", {"uid": "a"}, "q", (5, 6))])
