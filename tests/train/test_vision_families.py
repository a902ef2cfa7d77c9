"""Vision-language model families: rows with images, padded and packed, give the log-probs and gradients that
transformers gives for each row alone; and the engine's samples have the trainer's log-probs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Transpose

from posttrain.batch import Prompt
from posttrain.errors import PosttrainError
from posttrain.images import Image, open_image, png_url
from posttrain.models import tower
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.images import join_tensors, probe_image
from posttrain.models.load import LoadedModel, load
from posttrain.models.vision import TOWERS
from posttrain.recipe.load import load_dict
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Model
from posttrain.rollout.hf import TransformersEngine
from posttrain.train import rl, sft, sharding
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences, sequences_of
from posttrain.train.logprobs import completion_scores
from posttrain.train.pass_checks import packs_images

from .vision_families import FAMILIES, WIDE, prompts_of, save_seeing

KINDS = [
    kind if kind in ("qwen2_5_vl", "gemma3") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in ("tiny-vision", *FAMILIES)
]
TURNED = Image(png_url(open_image(probe_image()).transpose(Transpose.ROTATE_180)))


@pytest.fixture(params=KINDS)
def seeing(request: Any, tmp_path: Path) -> LoadedModel:
    kind = request.param
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    loaded = load(Model(path=path, vision="all"), tmp_path)
    loaded.model.train()
    return loaded


def rows_of(prompts: list[Prompt], words: list[list[int]]) -> Sequences:
    rows = [(*prompt.ids, *word) for prompt, word in zip(prompts, words, strict=True)]
    shown = tuple(prompt.images.shown if prompt.images else () for prompt in prompts)
    return Sequences(tuple(np.array(row) for row in rows), tuple(len(p.ids) for p in prompts), shown)


def alone(loaded: LoadedModel, rows: Sequences) -> list[torch.Tensor]:
    """Log-probs of each row's completion by transformers' own forward pass of that row."""
    found = []
    assert loaded.images is not None and rows.images is not None
    for ids, start, shown in zip(rows.ids, rows.prompt_lengths, rows.images, strict=True):
        row = torch.tensor(np.array(ids))[None]
        given = loaded.images.plain_inputs(loaded.model, shown, row)
        logp = loaded.model(input_ids=row, **given).logits[0].log_softmax(-1)
        found.append(logp[start - 1 : -1].gather(-1, row[0, start:, None])[:, 0])
    return found


def test_batched_rows_match_single_rows(seeing: LoadedModel) -> None:
    """Padded, and packed if the model supports row boundaries. The first image is in two rows and is encoded once."""
    rows = rows_of(prompts_of(seeing), [[20, 21, 22], [23, 24], [25, 26, 27, 28]])
    expected = alone(seeing, rows)
    weights = [p for n, p in seeing.model.named_parameters() if n.endswith(("q_proj.weight", "patch_embedding.weight"))]
    weights += [p for n, p in seeing.model.named_parameters() if n.endswith("patch_embed.proj.weight")]

    def gradient(logp: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(logp.sum(), weights))

    of_each = gradient(torch.cat(expected))
    packs = use_packed_attention(seeing.model) and packs_images(seeing)
    assert packs is (seeing.model.config.model_type != "gemma3")  # whose image tokens attend in both directions
    for packed in (False, True) if packs else (False,):
        scores = completion_scores(seeing.model, rows, 4, packed=packed, reader=seeing.images)
        for row, one in enumerate(expected):
            assert torch.allclose(scores["logp"][row, : len(one)], one, atol=2e-5), (packed, row)
        for ours, theirs in zip(gradient(scores["logp"]), of_each, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4), packed


def test_rows_of_a_group_share_prompt_and_images(seeing: LoadedModel) -> None:
    """Rows of four prompts are packed in one line and have the log-probs and gradients of single rows.

    Two of the prompts have the same tokens and different images, and one row also has an image after its prompt.
    Each image goes through the tower once, whether rows share their prompt or not.
    """
    pictured, several, plain = prompts_of(seeing)
    assert pictured.images is not None
    turned = dataclasses.replace(pictured, images=dataclasses.replace(pictured.images, shown=(TURNED,)))
    prompts = [pictured, several, turned, pictured, plain, several, turned, pictured, plain]
    assert seeing.images is not None
    words = [[20 + n, 21, 22, 23][: 2 + n % 3] for n in range(len(prompts))]
    words[7] += [*seeing.tokenizer(seeing.images.read(WIDE).text, add_special_tokens=False)["input_ids"], 24]
    rows = rows_of(prompts, words)
    assert rows.images is not None
    standing = tuple((*shown, WIDE) if n == 7 else shown for n, shown in enumerate(rows.images))
    rows = dataclasses.replace(rows, images=standing, prompt_images=tuple(map(len, rows.images)))
    expected = alone(seeing, rows)
    weights = [
        p for n, p in seeing.model.named_parameters() if n.endswith(("q_proj.weight", "patch_embed.proj.weight"))
    ]
    of_each = torch.autograd.grad(torch.cat(expected).sum(), weights)
    model, passes = backbone(causal_of(seeing.model)), list[int]()
    tower = next(module for name, module in model.named_modules() if name.rpartition(".")[2] in TOWERS)
    first = ("pixel_values", "hidden_states")
    tower.register_forward_pre_hook(
        lambda _, args, given: passes.append(len(args[0] if args else next(given[n] for n in first if n in given))),
        with_kwargs=True,
    )
    once = join_tensors([seeing.images.read(image).tensors for image in (probe_image(), WIDE, TURNED)])
    model.get_image_features(**once)
    (looked,) = passes
    read = list[int]()
    model.register_forward_pre_hook(lambda _, __, given: read.append(given["input_ids"].numel()), with_kwargs=True)
    packs = use_packed_attention(seeing.model) and packs_images(seeing)
    assert rows.prompts.numbers == (0, 1, 2, 0, 3, 1, 2, 0, 3) and rows.prompts.is_worthwhile()
    passes.clear()
    read.clear()
    for line in (False, True) if packs else (False,):
        found = completion_scores(
            seeing.model, rows, max(map(len, words)), packed=line, share=True, fill=64, reader=seeing.images
        )
        for row, one in enumerate(expected):
            assert torch.allclose(found["logp"][row, : len(one)], one, atol=2e-5), (line, row)
        for ours, theirs in zip(torch.autograd.grad(found["logp"].sum(), weights), of_each, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=2e-4), line
    assert passes == [looked] * (1 + packs)
    if packs:
        shared = sum(rows.prompts.shared_token_counts(range(len(rows))))
        assert read[1] == math.ceil((sum(rows.lengths) - shared) / 64) * 64 < sum(rows.lengths)


def test_image_tower_runs_once(seeing: LoadedModel, monkeypatch: Any) -> None:
    """With features; with pixels given to the model; with a probe, if a row has no image.

    Passes with images are counted, except idle ones, which leave no gradient.
    """
    model, reader = backbone(causal_of(seeing.model)), seeing.images
    assert reader is not None
    rows, runs = rows_of(prompts_of(seeing), [[20, 21, 22], [23, 24], [25, 26]]), list[int]()
    expected, see = alone(seeing, rows), model.get_image_features

    def counted(*args: Any, **given: Any) -> Any:
        fresh = not isinstance((*args, *given.values())[0], tower.Features)  # which are returned unchanged
        runs.append(fresh)
        return see(*args, **given)

    tower.run_in_every_pass(model, reader.read(probe_image()).tensors)
    monkeypatch.setattr(model, "get_image_features", counted)
    for row, images in enumerate(rows.images or ()):
        own = rows.select([row])
        for pixels in (False, True):
            runs.clear()
            if pixels:
                (logp,) = alone(seeing, own)
            else:
                logp = completion_scores(seeing.model, own, 3, reader=reader)["logp"][0, : len(expected[row])]
            torch.testing.assert_close(logp, expected[row], atol=1e-4, rtol=1e-4)
            assert sum(runs) == 1 and tower.pop_images_seen(model) is bool(images)
        with sharding.keep_without_gradient(seeing.model):
            (alone(seeing, own)[0].sum() * 0).backward()
        assert not tower.pop_images_seen(model) and all(w.grad is None for w in seeing.model.parameters())


def test_models_without_feature_inputs_give_the_same_results(seeing: LoadedModel, monkeypatch: Any) -> None:
    """Models of transformers before 5.19 get the features in place of pixels."""
    rows = rows_of(prompts_of(seeing), [[20, 21, 22], [23, 24], [25, 26]])
    with torch.no_grad():
        expected = completion_scores(seeing.model, rows, 3, reader=seeing.images)["logp"]
        monkeypatch.setattr(tower, "takes_features", lambda _: False)
        found = completion_scores(seeing.model, rows, 3, reader=seeing.images)["logp"]
        other = dataclasses.replace(rows, images=((TURNED,), *(rows.images or ())[1:]))
        turned = completion_scores(seeing.model, other, 3, reader=seeing.images)["logp"]
    assert torch.equal(found, expected)
    assert (turned[0] - found[0]).abs().max() > 1e-3 and torch.equal(turned[1:], found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_family_trains_two_steps(kind: str, rows_of: Any, tmp_path: Path) -> None:
    """sft, packed if a trial allows it, and rl with the transformers engine, whose log-probs are the trainer's."""
    save_seeing(kind, tmp_path / kind)
    open_image(probe_image()).save(tmp_path / "frame.png")
    open_image(WIDE).save(tmp_path / "wide.png")
    shown: list[dict[str, Any]] = [{"image": "frame.png"}, {"images": ["wide.png", "frame.png"]}, {}]
    asked = ("what", "<image>or<image>", "what")  # templates of Qwen's also have something between two images
    rows = [{"prompt": asked[n % 3] + "?" * n, "completion": "ab"[n % 2] * 3, **shown[n % 3]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def varied(completion: str) -> float:\n    return len(set(completion)) / 8\n")
    values = {"model": {"path": kind, "vision": "all"}, "data": {"source": "rows.jsonl"}, "optim": {"lr": 1e-3}}
    values |= {"run": {"steps": 2}}
    own: dict[str, dict[str, Any]] = {
        "sft": {"batch": {"size": 6, "micro_size": 3, "packing": kind != "gemma3"}},
        "rl": {"algorithm": "grpo", "rewards": [{"use": "./reward.py:varied"}], "scoring": {"workers": 1}},
    }
    own["rl"]["rollout"] = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6}
    for stage, train in (("sft", sft.run), ("rl", rl.run)):
        recipe = load_dict({"stage": stage, **values, **own[stage]}, base_dir=tmp_path, where="test").recipe
        found = rows_of(train, recipe, stage)
        assert len(found) == 2 and all(row["grad_norm"] > 0 for row in found)
        assert stage == "sft" or all(row["mismatch/mean"] < 1e-4 for row in found)
    if kind == "gemma3":
        own["sft"]["batch"]["packing"] = True
        recipe = load_dict({"stage": "sft", **values, **own["sft"]}, base_dir=tmp_path, where="test").recipe
        with pytest.raises(PosttrainError, match="packing"):
            rows_of(sft.run, recipe, "packed")


def test_sampled_tokens_have_the_trainers_log_probs(seeing: LoadedModel) -> None:
    """Two completions of each prompt in one batch: prompts are padded on the left and encoded once."""
    prompts = prompts_of(seeing)
    engine = TransformersEngine(seeing, batch_size=16)
    rollouts = engine.generate(prompts, 2, Sampling(max_new_tokens=5, temperature=1.0), seed=3)
    rows = sequences_of(rollouts)
    assert seeing.images is not None
    assert not any(seeing.images.token_ids & set(rollout.ids) for rollout in rollouts)
    seeing.model.eval()
    with torch.no_grad():
        scores = completion_scores(seeing.model, rows, 5, reader=seeing.images)["logp"]
    for row, rollout in enumerate(rollouts):
        assert rollout.logps == pytest.approx(scores[row, : len(rollout.ids)].tolist(), abs=2e-5)
    assert backbone(causal_of(seeing.model)) is not seeing.model


@pytest.mark.slow
def test_two_ranks_match_one_process(answer: Any, tmp_path: Path) -> None:
    """Log-probs and gradient norms of all families; first one of the ranks has no image, then neither has one."""
    for kind in FAMILIES:
        save_seeing(kind, tmp_path / kind)
    assert answer("ranked", work="split_seeing", root=str(tmp_path), kinds=list(FAMILIES), ranks=2) == [0, 0]
