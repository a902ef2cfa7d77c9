"""Systems whose papers train vision-language models, on `tiny-vision` and drawn pictures: three steps each, with a
gradient.

docs/systems.yaml names the systems. The central mechanism of each is asserted on text by a separate test; pictures
take the same path.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.tasks.pictures import find_square
from posttrain.recipe.stages import STAGES

from .test_presets import REWARDS, values_of

pytestmark = pytest.mark.slow
Values = dict[str, Any]
MODEL: Values = {"path": "tiny-vision", "vision": "all"}
PRESETS = ("curriculum_stage", "grpo_d", "gui_g1", "gui_libra_sngs", "hdpo", "pixelthink", "ptst", "taco")
THOUGHT = "<think>red, so here</think><answer>%s</answer>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rewards, and rows with a picture, the box of its square, and the columns that some systems read."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(12):
            row = find_square(number % 3, random.Random(number))
            own = {"easiness": 1.0 + number % 3, "difficulty": number % 5 / 4, "target": float(number)}
            written = {"completion": THOUGHT % row["answer"]}
            file.write(json.dumps({**row, **own, **written}) + "\n")
    return tmp_path


def run(cli: Any, folder: Path, values: Values) -> list[Values]:
    (folder / "recipe.yaml").write_text(json.dumps({"model": MODEL, "data": {"source": "rows.jsonl"}, **values}))
    cli.run(values["stage"].replace("_", "-"), str(folder / "recipe.yaml"), "--output", str(folder / "run"))
    found: list[Values] = cli.rows_of(folder / "run")
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_preset_trains_on_pictures(name: str, cli: Any, folder: Path) -> None:
    values = {**values_of(name), "model": MODEL, "run": {"steps": 3}}
    rows = run(cli, folder, values)
    assert len(rows) == 3 and any(row["grad_norm"] > 0 for row in rows)


RECIPES: dict[str, Values] = {
    "visual_rft_iou": {
        "stage": "rl",
        "algorithm": "grpo",
        "rewards": [{"use": "rewards.py:digits"}, {"use": "boxes.visual_rft_iou"}],
    },
    "gui_g1_boxes": {
        "stage": "rl",
        "algorithm": "gui_g1",
        "rewards": [{"use": "rewards.py:digits"}, {"use": "boxes.gui_g1"}],
    },
    "srpo_reflection": {
        "stage": "rl",
        "algorithm": "grpo",
        "rewards": [{"use": "rewards.py:digits"}, {"use": "reasoning.srpo_reflection", "params": {"compare": "words"}}],
    },
    "thurstone_rank": {
        "stage": "rl",
        "algorithm": "grpo",
        "group_rewards": ["thurstone"],
        "rewards": [{"use": "rewards.py:digits"}, {"use": "rewards.py:digits", "name": "prediction", "weight": 0}],
    },
    "ariadne": {
        "stage": "rl",
        "algorithm": "ariadne",
        "data": {
            "source": "task:ariadne",
            "size": 12,
            "params": {"levels": [2], "picture": True, "margin": 1},
        },
        "rewards": [{"use": "rewards.py:digits"}, {"use": "maze.path"}],
    },
    "vl_dac": {  # on a screen that is shown again after each turn
        "stage": "rl",
        "data": {"source": "task:screen", "size": 12, "params": {"levels": [1], "types": True}},
        "environment": {"use": "screen"},
        "advantage": "step_gae",
        "regularisers": [{"use": "value", "coef": 0.5, "clip": 0.1}],
        "rollout": {"max_new_tokens": 330, "turn_tokens": 8, "max_turns": 3},
        "rewards": [{"use": "rewards.py:digits"}, {"use": "environment.score"}, {"use": "environment.steps"}],
    },
    "thought_dropout": {"stage": "sft", "data": {"source": "rows.jsonl", "thought_dropout": 0.5}, "batch": {"size": 4}},
    "action_aware_sft": {"stage": "sft", "objective": "action_aware", "batch": {"size": 4}},
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_on_pictures(name: str, cli: Any, folder: Path) -> None:
    values: Values = {"run": {"steps": 3}, **RECIPES[name]}
    assert values["stage"] in STAGES
    if values["stage"] == "rl":
        values["rollout"] = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12, **values.get("rollout", {})}
        values |= {"scoring": {"workers": 1}, "optim": {"lr": 1e-3}}
    rows = run(cli, folder, values)
    assert len(rows) == 3 and any(row["grad_norm"] > 0 for row in rows)
