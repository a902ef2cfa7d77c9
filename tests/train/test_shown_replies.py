"""Tools and environments that show images: the next turn sees them, the trainer reads the whole transcript with all
images in order, and none of their tokens is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from posttrain.batch import Prompt, PromptImages, Rollout
from posttrain.errors import ToolError
from posttrain.images import Image, open_image, png_url
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel, load
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.load import load_dict
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Model
from posttrain.recipe.tool_sections import Tool
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.turns import TurnEngine
from posttrain.tools.call import Call
from posttrain.tools.calls import Caller
from posttrain.tools.environments import Environments, Tools
from posttrain.tools.load import load_tools
from posttrain.train import rl
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences, rollout_batch, sequences_of
from posttrain.train.logprobs import completion_scores
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict

from ..scripted_engines import ScriptedEngine
from .vision_families import save_seeing

COLORS = ("red", "lime", "blue", "white")
SAMPLING = Sampling(max_new_tokens=400, turn_tokens=5, max_turns=3, stop=list("aeiou0123456789"))


class Gallery:
    """Environment that shows a picture after each turn, chosen by the turn's text, with a text on one side of it."""

    def reset(self, row: Any) -> None:
        assert row["prompt"]
        self.turns = 0

    def step(self, text: str) -> tuple[Any, bool]:
        self.turns += 1
        picture = Pillow.new("RGB", (40, 24), COLORS[len(text) % 4])
        return (["see ", picture, "<image>"] if self.turns == 1 else picture), self.turns == 3

    def score(self) -> float:
        return 1.0

    def close(self) -> None: ...


@pytest.fixture(params=["tiny-vision", "qwen2_5_vl"])
def seeing(request: Any, tmp_path: Path) -> LoadedModel:
    kind = request.param
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    return load(Model(path=path, vision="all"), tmp_path)


def prompts_of(loaded: LoadedModel) -> list[Prompt]:
    """Return prompts with an image and without."""
    reader, tokenizer = loaded.images, loaded.tokenizer
    assert reader is not None
    image = probe_image()
    whole, short = (
        tuple(tokenizer(f"a{text}bc?")["input_ids"]) for text in (reader.read(image).text, reader.placeholder)
    )
    shown = PromptImages((image,), short, len(whole))
    return [
        Prompt("0", {"prompt": "a", "images": [image.source]}, "", whole, shown),
        Prompt("1", {"prompt": "abc"}, "", tuple(tokenizer("abc")["input_ids"])),
    ]


def visits(loaded: LoadedModel, n: int) -> list[Rollout]:
    inner = TransformersEngine(loaded, batch_size=8)
    engine = TurnEngine(inner, Environments(Gallery, 2, 9.0), loaded.tokenizer, loaded.eos_ids, loaded.images)
    found = engine.generate(prompts_of(loaded), n, SAMPLING, seed=5)
    engine.close()
    return found


def test_transcript_with_images_has_equal_log_probs_in_engine_and_trainer(seeing: LoadedModel) -> None:
    """Log-probs of the engine, which saw each turn's images when it sampled the turn, equal those of one pass over the
    whole transcript, padded and packed. Other images after the first turn change only the following turns."""
    found = visits(seeing, 3)
    assert seeing.images is not None
    feature, rows = seeing.images.feature_id, sequences_of(found)
    batch = rollout_batch(found)
    assert any(len(r.turns) == 3 for r in found)
    for n, r in enumerate(found):
        replies = [segment for segment in r.segments if segment.kind == "tool"]
        assert [len(segment.images.shown) for segment in replies if segment.images] == [1] * len(replies)
        assert rows.images is not None and rows.images[n] == r.images
        tokens = [seeing.tokenizer(seeing.images.read(image).text)["input_ids"].count(feature) for image in r.images]
        assert (r.prompt.ids + r.ids).count(feature) == sum(tokens)
        assert not batch.mask[n, : len(r.ids)][torch.tensor(r.ids) == feature].any()
        if replies:
            assert r.turns[0].reply == "see \n<image>\n< image>"
            assert replies[0].images is not None and replies[0].images.short_ids.count(feature) == 1
            assert open_image(replies[0].images.shown[0]).size == (40, 24)
    assert use_packed_attention(seeing.model)
    with torch.no_grad():
        width = batch.mask.shape[1]
        passes = [
            completion_scores(seeing.model, rows, width, packed=packed, reader=seeing.images)["logp"]
            for packed in (False, True)
        ]
        other = Image(png_url(Pillow.new("RGB", (40, 24), (90, 10, 60))))
        assert rows.images is not None
        changed = tuple(
            (*own[: len(own) - 1], other) if len(r.turns) > 1 else own
            for r, own in zip(found, rows.images, strict=True)
        )
        repainted = Sequences(rows.ids, rows.prompt_lengths, changed)
        passes.append(completion_scores(seeing.model, repainted, width, reader=seeing.images)["logp"])
    for n, r in enumerate(found):
        trained = torch.tensor(r.loss_mask)
        sampled = torch.tensor(r.logps)[trained]
        for logp in passes[:2]:
            assert torch.allclose(logp[n, : len(r.ids)][trained], sampled, atol=3e-5)
        if len(r.turns) > 1:
            before = sum(len(segment.ids) for segment in r.segments[:-2])
            gap = (passes[2][n, : len(r.ids)] - passes[0][n, : len(r.ids)]).abs()
            assert gap[:before].max() < 1e-5 < gap[-len(r.segments[-1].ids) :].max()


def test_rollout_with_images_is_restored_from_a_checkpoint(seeing: LoadedModel) -> None:
    for r in visits(seeing, 1):
        assert rollout_from_dict(json.loads(json.dumps(rollout_to_dict(r))), r.prompt) == r


def crops(loaded: LoadedModel, words: list[str], row: dict[str, Any], **limits: Any) -> Rollout:
    """Return the rollout of a model that writes these turns, with the tool `crop`."""
    tokenizer, turns = loaded.tokenizer, iter(words)
    caller = Caller(load_tools([Tool(use="crop", params={"min_pixels": 1})], Path.cwd()), 1)
    engine = TurnEngine(
        ScriptedEngine(lambda *_: next(turns), tokenizer),
        Tools(caller, "json"),
        tokenizer,
        loaded.eos_ids,
        loaded.images,
    )
    try:
        asked = Prompt("0", row, "", tuple(tokenizer("abc")["input_ids"]))
        (found,) = engine.generate([asked], 1, Sampling(max_new_tokens=900, **limits), seed=0)
    finally:
        engine.close()
    return found


def call(box: list[float], number: int = 1) -> str:
    return f"<tool_call>{json.dumps({'name': 'crop', 'arguments': {'bbox_2d': box, 'image': number}})}</tool_call>"


def test_crop_applies_to_the_rows_image_and_to_earlier_crops(tmp_path: Path) -> None:
    """The right half of an image with a blue half; the upper half of that crop; then an invalid box."""
    loaded = load(Model(path="tiny-vision"), tmp_path)
    picture = Pillow.new("RGB", (32, 16), "red")
    picture.paste((0, 0, 255), (16, 0, 32, 16))
    turns = [call([500, 0, 1000, 1000]), call([0, 0, 1000, 500], 2), call([9, 9, 1, 1]), call([0, 0, 9, 9], 7), "done"]
    found = crops(loaded, turns, {"prompt": "abc", "images": [png_url(picture)]}, max_turns=9)
    shown = [open_image(image) for image in found.images]
    assert [one.size for one in shown] == [(16, 16), (16, 8)]
    assert {one.getpixel((3, 3)) for one in shown} == {(0, 0, 255)}
    results = [turn.calls[0] for turn in found.turns[:-1]]
    assert [result.kind for result in results] == ["ok", "ok", "error", "error"]
    assert results[0].result == "<image>" and results[0].images == ()
    assert "left before its right" in results[2].result and "no image 7" in results[3].result


def test_text_model_with_image_tools_is_refused(tmp_path: Path) -> None:
    loaded = load(Model(path="tiny"), tmp_path)
    row = {"prompt": "abc", "images": [probe_image().source]}
    with pytest.raises(ToolError, match="the model takes no images"):
        crops(loaded, [call([0, 0, 900, 900]), "done"], row)


def test_tool_annotated_as_text_only_must_not_return_images(tmp_path: Path) -> None:
    """Otherwise a run without image support would get an image during training."""
    loaded = load(Model(path="tiny-vision"), tmp_path)
    (tmp_path / "own.py").write_text(
        "from PIL import Image\n\n\ndef draw(x: int) -> str:\n"
        '    """Draw.\n\n    Args:\n        x: a number\n    """\n    return Image.new("RGB", (9, 9))\n'
    )
    with (
        Caller(load_tools([Tool(use="own.py:draw")], tmp_path), 1) as caller,
        pytest.raises(ToolError, match="tool draw returned an image, and its annotation says that it returns none"),
    ):
        caller.run([Call("draw", {"x": 1})])
    world = Environments(Gallery, 1, 9.0, shows=False)
    engine = TurnEngine(
        TransformersEngine(loaded, batch_size=8), world, loaded.tokenizer, loaded.eos_ids, loaded.images
    )
    with pytest.raises(ToolError, match="step showed an image, and its annotation says that it shows none"):
        engine.generate(prompts_of(loaded)[1:], 1, SAMPLING, seed=5)


def test_rl_in_an_environment_that_shows_images_resumes_exactly(tmp_path: Path, rows_of: Any) -> None:
    (tmp_path / "gallery.py").write_text(
        "from PIL import Image\n\n\nclass Gallery:\n    def reset(self, row):\n        self.turns = 0\n\n"
        "    def step(self, text):\n        self.turns += 1\n"
        "        return Image.new('RGB', (20, 20), (9 * len(text), 80, 20)), self.turns == 3\n\n"
        "    def score(self):\n        return 1.0\n\n    def close(self):\n        pass\n"
    )
    (tmp_path / "reward.py").write_text("def varied(completion: str) -> float:\n    return len(set(completion)) / 8\n")
    Pillow.new("RGB", (24, 16), "red").save(tmp_path / "red.png")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"what{'?' * n}", "image": "red.png"}) + "\n" for n in range(3))
    )

    def recipe(steps: int) -> Any:
        values = {
            "stage": "rl",
            "algorithm": "grpo",
            "model": {"path": "tiny-vision", "vision": "all"},
            "data": {"source": "rows.jsonl"},
            "environment": {"use": "./gallery.py:Gallery"},
            "rewards": [{"use": "./reward.py:varied"}],
            "scoring": {"workers": 1},
            "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 250, "turn_tokens": 8},
            "optim": {"lr": 1e-3},
            "run": {"steps": steps},
        }
        values["rollout"]["stop"] = list("aeiou0123456789")  # type: ignore[index]
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    whole = rows_of(rl.run, recipe(3), "whole")
    assert all(row["mismatch/mean"] < 1e-5 for row in whole)
    assert max(row["turns/mean"] for row in whole) > 1
    rows_of(rl.run, recipe(1), "parts")
    assert rows_of(rl.run, recipe(3), "parts", resume=True) == whole
    assert "data:image" in (tmp_path / "whole" / "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["adaptvision", "pixel_reasoner"])
def test_model_with_the_crop_tool_trains_three_steps(algorithm: str, tmp_path: Path, cli: Any) -> None:
    """After SFT on a few traces with calls; the reward for the requested region differs between rows."""
    cards = {"levels": [1], "distinct": False, "colours": ["red", "blue"], "template": "{colour}?"}
    task = {"task": "fine_lines", "params": cards}
    pictures = str(shipped_folder("recipes") / "vision" / "pictures.py")
    model = {"path": "tiny-vision", "vision": "all"}
    start = {"stage": "sft", "model": model, "batch": {"size": 16}, "optim": {"lr": 4e-3}, "run": {"steps": 90}}
    start |= {"data": {"source": f"{pictures}:crop_traces", "size": 1440, "train_on": "assistant", "params": task}}
    (tmp_path / "sft.yaml").write_text(json.dumps(start))
    cli.run("sft", str(tmp_path / "sft.yaml"), "--output", str(tmp_path / "sft"))
    rewards = [{"use": "math.accuracy", "params": {"extract": ["answer_tag"]}, "correct": True}]
    rewards += [{"use": "crops.region", "weight": 0.0}, {"use": "efficiency.tool_calls", "weight": 0.0}]
    values = {
        **{"stage": "rl", "algorithm": algorithm, "model": {**model, "path": str(tmp_path / "sft" / "final")}},
        "data": {"source": f"{pictures}:problems", "size": 48, "image": {"max_pixels": 4096}, "params": task},
        **{
            "tools": [{"use": "crop", "params": {"min_pixels": 1}}],
            "tool_prompt": "none",
            "tool_format": "pythonic",
            "rewards": rewards,
        },
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 220, "max_turns": 2, "turn_tokens": 90},
        **{"scoring": {"workers": 1}, "run": {"steps": 3}, "optim": {"lr": 1e-3}},
    }
    (tmp_path / "rl.yaml").write_text(json.dumps(values))
    cli.run("rl", str(tmp_path / "rl.yaml"), "--output", str(tmp_path / "rl"))
    found = cli.rows_of(tmp_path / "rl")
    assert len(found) == 3 and all(row["grad_norm"] > 0 for row in found)
    assert max(row["rewards/tool_calls/mean"] for row in found) > 0
    assert max(row["turns/mean"] for row in found) > 1
