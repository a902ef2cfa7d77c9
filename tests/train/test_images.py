"""Training on rows with images: packed equals padded, runs resume exactly, and unsupported recipes are refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import RecipeError
from posttrain.recipe.checks import problems_with_images
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run.metrics import read_metrics
from posttrain.train import pair_packing, preference, rl, sft

Values = dict[str, Any]
COLORS = ("red", "green", "blue", "white")
REWARD = "def varied(completion: str) -> float:\n    return len(set(completion)) / 8\n"
REWARD += "EXAMPLES = [('a', {}, 0.125), ('ab', {}, 0.25), ('', {}, 0.0), ('aa', {}, 0.125)]\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Stage]:
    """Return a recipe on 12 rows, two of which have no image and one of which has two; keyword arguments change it."""
    draw = random.Random(0)
    for color in COLORS:
        Pillow.new("RGB", (24, 16), color).save(tmp_path / f"{color}.png")
    with (tmp_path / "rows.jsonl").open("w") as file:
        for n in range(12):
            color = draw.choice(COLORS)
            shown: Values = {} if n in (3, 7) else {"images": [f"{color}.png"] * (1 + (n == 5))}
            row = {"prompt": "what" + "?" * (n % 3), "completion": color, "chosen": color, "rejected": "no", **shown}
            file.write(json.dumps({**row, "answer": color[0]}) + "\n")
    (tmp_path / "reward.py").write_text(REWARD)

    def make(stage: str, **changes: Any) -> Stage:
        base: Values = {"stage": stage, "model": {"path": "tiny-vision", "vision": "all"}, "optim": {"lr": 1e-3}}
        base |= {"data": {"source": "rows.jsonl"}, "run": {"steps": 4}}
        if stage == "rl":
            base |= {"algorithm": "grpo", "rewards": [{"use": "./reward.py:varied"}], "batch": {"minibatches": 2}}
            base |= {"rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6}}
        else:
            base |= {"batch": {"size": 6, "micro_size": 3}, **({"loss": {"use": "dpo"}} if stage == "dpo" else {})}
        merged = {k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in changes.items()}
        return load_dict({**base, **merged}, base_dir=tmp_path, where="test").recipe

    return make


def test_packed_losses_equal_padded_losses(recipe: Any, rows_of: Any) -> None:
    """Four steps of Adam, whose updates depend on every earlier gradient."""
    padded = rows_of(sft.run, recipe("sft"), "padded")
    packed = rows_of(sft.run, recipe("sft", batch={"packing": True}), "packed")
    for one, other in zip(padded, packed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_micro_batches_change_nothing(recipe: Any, rows_of: Any) -> None:
    """Some micro-batches of a step have no image."""
    whole = rows_of(sft.run, recipe("sft", batch={"micro_size": 6}), "whole")
    single = rows_of(sft.run, recipe("sft", batch={"micro_size": 1}), "single")
    assert [row["loss"] for row in single] == pytest.approx([row["loss"] for row in whole], rel=1e-5)


def test_both_sides_of_a_pair_see_its_images(recipe: Any, rows_of: Any, monkeypatch: Any) -> None:
    """The policy starts as the reference: dpo's loss is log 2. Micro-batches of one pair give the same steps, and so do
    packed pairs."""
    whole = rows_of(preference.run, recipe("dpo", run={"steps": 2}), "whole")
    single = rows_of(preference.run, recipe("dpo", batch={"micro_size": 1}, run={"steps": 2}), "single")
    monkeypatch.setattr(preference, "enable_packing", pair_packing.packs_exactly)
    packed = rows_of(preference.run, recipe("dpo", run={"steps": 2}), "packed")
    for other in (single, packed):
        assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
        assert [row["grad_norm"] for row in other] == pytest.approx([row["grad_norm"] for row in whole], rel=1e-3)
    assert whole[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert whole[1]["loss"] < whole[0]["loss"]


@pytest.mark.parametrize("stage", ["sft", "rl", pytest.param("dpo", marks=pytest.mark.slow)])
def test_run_resumes_exactly(stage: str, recipe: Any, rows_of: Any) -> None:
    run = {"sft": sft.run, "rl": rl.run, "dpo": preference.run}[stage]
    whole = rows_of(run, recipe(stage), "whole")
    rows_of(run, recipe(stage, run={"steps": 2}), "parts")
    assert rows_of(run, recipe(stage), "parts", resume=True) == whole


@pytest.mark.slow
def test_policy_learns_from_images(recipe: Any, rows_of: Any) -> None:
    """The answer is the color of the image, which no text contains: without the vision tower it cannot be learned."""
    data = {"run": {"steps": 40}, "optim": {"lr": 5e-3}, "batch": {"size": 12, "micro_size": 12}}
    seen = rows_of(sft.run, recipe("sft", **data), "seen")[-1]
    assert seen["loss"] < 0.15


def test_rl_step_with_images(recipe: Any, seen: Any, rows_of: Any) -> None:
    """Prompts contain an image's tokens, completions none; the engine's log-probs equal the trainer's."""
    rows = rows_of(rl.run, recipe("rl", run={"steps": 2}))
    first = seen.rollouts[0]
    assert any(rollout.images for rollout in first)
    reader_id = 110
    assert not any(reader_id in rollout.ids for rollout in first)
    assert all(rollout.prompt.ids.count(reader_id) == 64 * len(rollout.images) for rollout in first)
    assert rows[0]["updates"] == 2


@pytest.mark.parametrize(
    ("stage", "changes", "said"),
    [
        ("sft", {"objective": {"use": "pear", "behavior_model": "tiny"}}, "behavior_model: the rows have images"),
        ("rl", {"sampler": "pcl"}, "sampler: the rows have images"),
    ],
)
def test_settings_incompatible_with_images_are_refused(
    stage: str, changes: Values, said: str, recipe: Any, opened: Any
) -> None:
    with pytest.raises(RecipeError) as found, opened() as directory:
        {"rl": rl.run, "sft": sft.run}[stage](recipe(stage, **changes), directory)
    assert said in str(found.value)


def test_vision_models_support_only_shard_and_replicate(recipe: Any) -> None:
    def refused(parallel: Values) -> list[str]:
        made = recipe("sft", model={"parallel": parallel}, batch={"packing": True})
        return [problem.what.partition(":")[0] for problem in problems_with_images(made, rows=True)]

    assert [refused({key: 2}) for key in ("context", "tensor", "expert")] == [
        ["model.parallel.context"], ["model.parallel.tensor"], ["model.parallel.expert"]
    ]  # fmt: skip
    assert refused({"shard": 2, "replicate": 2}) == []


HALVES: Values = {"parallel": {}}


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        ("sft", HALVES),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                *(("sft", {}), ("sft", {**HALVES, "vision": "frozen"}), ("sft", {**HALVES, "lora": {"rank": 4}})),
                *(("rl", {}), ("rl", HALVES), ("rl", {**HALVES, "lora": {"rank": 4}})),
                *(("dpo", {}), ("dpo", HALVES), ("dpo", {**HALVES, "vision": "projector"})),
            )
        ),
    ],
)
def test_two_ranks_equal_one(stage: str, model: Values, recipe: Any, answer: Any, tmp_path: Path) -> None:
    """With the full model each, or half of its weights; they stop, and resume from their checkpoint. Micro-batches of
    one row, some without an image: a rank may get a step's rows without any."""

    def run(name: str, ranks: int, steps: int, *, resume: bool = False) -> list[Values]:
        values: Values = {"batch": {"size": 6, "micro_size": 1}} if stage != "rl" else {"batch": {"micro_tokens": 100}}
        own = {key: value for key, value in model.items() if ranks > 1 or key != "parallel"}
        made = recipe(stage, run={"steps": steps}, model=own, **values)
        given = json.loads(made.model_dump_json(by_alias=True, exclude_unset=True))
        job = {"recipe": given, "base_dirs": [str(tmp_path)], "output": str(tmp_path / name), "resume": resume}
        assert answer("ranked", **job, ranks=ranks, lost_sync=None, engine=None) == [0] * ranks
        return read_metrics(tmp_path / name)

    one = run("one", 1, 3)
    run("two", 2, 2)
    two = run("two", 2, 3, resume=True)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=1e-5, abs=1e-6)


def test_commands_before_a_run_read_the_images(recipe: Any, cli: Any, tmp_path: Path) -> None:
    """validate, plan, data inspect and data audit."""
    values = {"stage": "sft", "model": {"path": "tiny-vision", "vision": "all"}, "data": {"source": "rows.jsonl"}}
    values |= {"batch": {"size": 6}, "run": {"steps": 2}}
    recipe("sft")
    path = tmp_path / "sft.yaml"
    path.write_text(json.dumps(values))
    cli.run("recipe", "validate", str(path))
    assert "longest row" in cli.run("plan", str(path))
    shown = (
        CliRunner().invoke(app, ["data", "inspect", str(path), "--rows", "1"]).output
    )  # it finds near-duplicate rows
    assert "24 x 16 pixels, 64 tokens" in shown and "<image> x64" in shown
    assert "12 rows" in CliRunner().invoke(app, ["data", "audit", str(path)]).output
    (tmp_path / "red.png").write_bytes(b"no image")
    assert "red.png is not an image" in cli.refused("recipe", "validate", str(path))
    assert "reads none" in cli.refused("recipe", "validate", str(path), "model={path: tiny}")
