"""Vision reward models: trained on rows with images, saved, loaded again, and used as an rl reward on such rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from posttrain.errors import PosttrainError
from posttrain.images import Image
from posttrain.models import scorer
from posttrain.models.images import probe_image
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Model
from posttrain.recipe.stages import Stage
from posttrain.run.metrics import read_metrics
from posttrain.train import reward_model, rl

from .conftest import merge_sections
from .vision_families import FAMILIES, save_seeing

COLOURS = ("red", "green", "blue", "white")


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Stage]:
    """Return a reward model's recipe on 16 pairs: the chosen side names the color of the image. Every fourth row has no
    image and uninformative answers."""
    for colour in COLOURS:
        Pillow.new("RGB", (24, 16), colour).save(tmp_path / f"{colour}.png")
    rows: list[dict[str, Any]] = []
    for n in range(16):
        own, other = COLOURS[n % 4], COLOURS[(n + 1 + n % 3) % 4]
        shown = {} if n % 5 == 4 else {"image": f"{own}.png"}
        rows.append({"prompt": "which" + "?" * (n % 3), "chosen": own, "rejected": other, **shown})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "stage": "reward_model",
        "model": {"path": "tiny-vision", "vision": "all"},
        "data": {"source": "rows.jsonl"},
        "objective": {"holdout": 0},
        "batch": {"size": 8, "micro_size": 4},
        "optim": {"lr": 3e-3},
        "run": {"steps": 4},
    }

    def make(**changes: Any) -> Stage:
        return load_dict(merge_sections(base, changes), base_dir=tmp_path, where="test").recipe

    return make


def test_micro_batches_and_resuming_change_nothing(recipe: Any, rows_of: Any) -> None:
    """Some micro-batches of one pair have no image."""
    whole = rows_of(reward_model.run, recipe(), "whole")
    rows_of(reward_model.run, recipe(run={"steps": 2}), "parts")
    assert rows_of(reward_model.run, recipe(), "parts", resume=True) == whole
    single = rows_of(reward_model.run, recipe(batch={"micro_size": 1}), "single")
    assert [row["loss"] for row in single] == pytest.approx([row["loss"] for row in whole], rel=1e-3)


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_saved_reward_model_scores_by_the_image(lora: Any, recipe: Any, opened: Any, tmp_path: Path) -> None:
    """The same answers get other scores with another image; the rewards of an rl step on such rows equal the scores of
    the loaded model."""
    with opened("rm") as directory:
        summary = reward_model.run(recipe(model={"lora": lora}), directory)
    assert summary["save"]["max_score_gap"] < 1e-4
    again = scorer.load(Model(path=str(directory.final)), tmp_path)
    reader = again.images
    assert reader is not None and again.model.config.architectures == ["LlavaForSequenceClassification"]
    row = again.tokenizer(reader.read(probe_image()).text + "red", add_special_tokens=False)["input_ids"]
    blank = Image(str(tmp_path / "white.png"))
    scores = scorer.score_rows(again, [row, row, row], [(probe_image(),), (blank,), (probe_image(),)])
    assert scores[0] == pytest.approx(scores[2]) and (scores[0] - scores[1]).abs() > 1e-4
    values = {
        "stage": "rl",
        "algorithm": "grpo",
        "model": {"path": "tiny-vision"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4},
        "rewards": [{"use": "reward_model", "params": {"path": str(directory.final)}}],
        "run": {"steps": 1},
    }
    with opened("rl") as directory:
        rl.run(load_dict(values, base_dir=tmp_path, where="test").recipe, directory)
    assert read_metrics(directory.path)[0]["reward"] != 0


def test_text_reward_model_with_images_is_refused(recipe: Any, opened: Any, tmp_path: Path) -> None:
    """Its scores would be those of prompts without their images."""
    pairs = [{"prompt": "which", "chosen": "red", "rejected": "blue" + "." * n} for n in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    values = {"model": {"path": "tiny", "vision": None}, "data": {"source": "texts.jsonl"}, "run": {"steps": 1}}
    with opened("rm") as directory:
        reward_model.run(recipe(**values), directory)
    rewards = [{"use": "reward_model", "params": {"path": str(directory.final)}}]
    rollout = {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4}
    given = {"stage": "rl", "algorithm": "grpo", "model": {"path": "tiny-vision"}, "data": {"source": "rows.jsonl"}}
    given |= {"rollout": rollout, "rewards": rewards, "run": {"steps": 1}}
    made = load_dict(given, base_dir=tmp_path, where="test").recipe
    with opened("rl") as directory, pytest.raises(PosttrainError, match="reads none"):
        rl.run(made, directory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_saves_and_loads(kind: str, tmp_path: Path) -> None:
    """`scorer.save` compares the scores of texts and of an image, and raises where they differ."""
    loaded = scorer.load(Model(path=str(save_seeing(kind, tmp_path / kind))), tmp_path, outputs=2)
    assert loaded.images is not None
    assert scorer.save(loaded, tmp_path / "saved", scorer.Card(heads=("a", "b")))["max_score_gap"] < 1e-4
    again = scorer.load(Model(path=str(tmp_path / "saved")), tmp_path)
    assert torch.equal(again.model.score.weight, loaded.model.score.weight)
