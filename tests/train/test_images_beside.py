"""Other recipe features combined with images: prompts built by each feature contain the row's images, and runs resume
exactly."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as Pillow

from posttrain.errors import UserError
from posttrain.models import tiny_vision
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.train import assemble, preference, rl

Values = dict[str, Any]
FEATURE = 110
REWARD = "def varied(completion: str) -> float:\n    return len(set(completion)) / 8\n"
REVIEW = """
async def review(row, call):
    first = await call("writer", row["prompt"])
    await call("critic", [{"role": "user", "content": f"{row['prompt']} Is it {first.text[:5]}?"}])
    await call("reader", f"no picture: {first.text[:3]}")
"""


def recipe(folder: Path, stage: str = "rl", **changes: Any) -> Stage:
    """Return a recipe on rows of which one has no image and one has two."""
    for color in ("red", "lime"):
        Pillow.new("RGB", (24, 16), color).save(folder / f"{color}.png")
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(6):
            shown = [] if n == 3 else ["red.png", "lime.png"] if n == 5 else [("red.png", "lime.png")[n % 2]]
            row = {"prompt": "<image>" * len(shown) + "what" + "?" * (n % 3), "images": shown, "answer": "red"}
            file.write(
                json.dumps({**row, "completion": "red", "solution": "red", "chosen": "red", "rejected": "no"}) + "\n"
            )
    (folder / "reward.py").write_text(REWARD)
    (folder / "review.py").write_text(REVIEW)
    values: Values = {"stage": stage, "model": {"path": "tiny-vision", "vision": "all"}, "optim": {"lr": 1e-3}}
    values |= {"data": {"source": "rows.jsonl"}, "run": {"steps": 3}}
    if stage == "rl":
        values |= {"algorithm": "grpo", "rewards": [{"use": "./reward.py:varied", "correct": True}]}
        values |= {"scoring": {"workers": 1, "correct_at": 0.5}}
        values["rollout"] = {"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 6}
    merged = {k: {**values[k], **v} if isinstance(values.get(k), dict) else v for k, v in changes.items()}
    return load_dict({**values, **merged}, base_dir=folder, where="test").recipe


BESIDE: dict[str, Values] = {
    "prompt_variants": {"prompt_variants": {"use": "prior_instruction", "style": "perception"}},
    "replay": {"replay": {"use": "success", "limit": 8}},
    "solutions": {"solutions": {"column": "solution", "in_group": True}},
    "shape": {
        "rollout": {"shape": {"use": "chunks", "keep_head": 1, "keep_tail": 3, "max_chunks": 2}},
        "advantage": "trajectory",
    },
    "workflow": {"rollout": {"workflow": {"use": "./review.py:review"}}},
    "stored": {"rollout": {"engine": "stored", "group_size": 1}, "advantage": "reward"},
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("prompt_variants", "workflow") else pytest.param(name, marks=pytest.mark.slow)
        for name in BESIDE
    ],
)
def test_feature_trains_on_images_and_resumes_exactly(name: str, tmp_path: Path, rows_of: Any, seen: Any) -> None:
    """Prompts contain 64 image tokens for each image of their row."""
    whole = rows_of(rl.run, recipe(tmp_path, **BESIDE[name]), "whole")
    rollouts = [rollout for step in seen.rollouts for rollout in step]
    assert any(rollout.images for rollout in rollouts)
    assert all(rollout.prompt.ids.count(FEATURE) == 64 * len(rollout.images) for rollout in rollouts)
    assert all(
        rollout.prompt.images.short_ids.count(FEATURE) == len(rollout.images) for rollout in rollouts if rollout.images
    )
    if name == "workflow":
        of_role = {role: {bool(r.images) for r in rollouts if r.call.role == role} for role in ("critic", "reader")}
        assert of_role == {"critic": {True, False}, "reader": {False}}
    assert all(row.get("mismatch/mean", 0.0) < 1e-5 for row in whole)
    assert any(row["grad_norm"] > 0 for row in whole)
    rows_of(rl.run, recipe(tmp_path, **BESIDE[name], run={"steps": 2}), "parts")
    assert rows_of(rl.run, recipe(tmp_path, **BESIDE[name]), "parts", resume=True) == whole


def test_named_reference_sees_the_images(tmp_path: Path, rows_of: Any) -> None:
    """A copy of the policy gives the same log-probs; a model with another tower does not; one with other pixel settings
    is refused."""
    kl = {"reference": "tiny-vision", "coef": 0.1}
    same = rows_of(rl.run, recipe(tmp_path, kl=kl, run={"steps": 1}), "same")[0]
    assert abs(same["kl"]) < 1e-6
    model, tokenizer = tiny_vision.build(seed=1)
    model.save_pretrained(tmp_path / "tower")
    processor = tiny_vision.build_processor(tokenizer)
    processor.save_pretrained(tmp_path / "tower")
    other = rows_of(rl.run, recipe(tmp_path, kl={**kl, "reference": "tower"}, run={"steps": 1}), "other")[0]
    assert other["kl"] > 1e-3
    processor.image_processor.image_mean = [0.3] * 3
    processor.save_pretrained(tmp_path / "tower")
    with pytest.raises(UserError, match="processes images differently"):
        rows_of(rl.run, recipe(tmp_path, kl={**kl, "reference": "tower"}), "refused")


def test_text_reference_is_accepted_if_no_images_can_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that show no images need no vision reference."""
    monkeypatch.setattr(assemble, "load_reference", lambda *_, images: images)
    text, seen = SimpleNamespace(images=None), SimpleNamespace(images="some")
    for prompts, shows, asked in (
        ([text], None, False),
        ([text], False, False),
        ([text], True, True),
        ([seen], None, True),
    ):
        offer = None if shows is None else SimpleNamespace(shows=shows)
        work: Any = SimpleNamespace(objective=SimpleNamespace(needs={"ref_logp"}), offer=offer, prompts=prompts)
        recipe: Any = SimpleNamespace(critic=SimpleNamespace(path=None))
        assert assemble.build_reference(recipe, work, None) is asked  # type: ignore[arg-type]


def test_online_kl_answers_see_the_pairs_images(tmp_path: Path, rows_of: Any) -> None:
    """The policy starts as the reference; micro-batches of one pair give the steps of whole batches."""
    values = {"loss": {"use": "dpo"}, "online_kl": {"coef": 0.1, "samples": 2, "max_new_tokens": 4}}
    values |= {"batch": {"size": 6, "micro_size": 3}, "run": {"steps": 2}}
    whole = rows_of(preference.run, recipe(tmp_path, "dpo", **values), "whole")
    single = rows_of(
        preference.run, recipe(tmp_path, "dpo", **{**values, "batch": {"size": 6, "micro_size": 1}}), "single"
    )
    (name,) = [key for key in whole[0] if key.startswith("online_kl")]
    assert abs(whole[0][name]) < 1e-6 < whole[1][name]
    assert [row["loss"] for row in single] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
