"""Losses of sft and GRPO on rows with images compared with TRL, on the same rows and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from posttrain.batch import RolloutBatch
from posttrain.data.prepare import prepare_examples, prepare_prompts
from posttrain.models.load import load
from posttrain.recipe.sections import Data, Model
from posttrain.train import sft
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.image_batches import image_inputs, with_images
from posttrain.train.logprobs import completion_scores
from tests.preset_objectives import preset_objective

from .vision_families import save_seeing


@pytest.mark.parametrize("kind", ["tiny-vision", "qwen2_5_vl"])
def test_sft_loss_matches_trl(kind: str, tmp_path: Path) -> None:
    """Prompts and answers of uneven length; TRL pads prompts on the left and moves them, we pad on the right."""
    rows, theirs = [], []
    for n, color in enumerate(("red", "green", "blue")):
        Pillow.new("RGB", (40, 24 + 8 * n), color).save(tmp_path / f"{color}.png")
        asked = "what" + "?" * n
        rows.append({"prompt": f"<image>{asked}", "completion": color, "image": f"{color}.png"})
        prompt: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        pictures = [Pillow.open(tmp_path / f"{color}.png")]
        theirs.append({"images": pictures, "prompt": prompt, "completion": [{"role": "assistant", "content": color}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    loaded = load(Model(path=path, vision="all"), tmp_path)
    assert loaded.images is not None
    data = Data(source=str(tmp_path / "rows.jsonl"))
    examples = prepare_examples(data, loaded.tokenizer, tmp_path, reader=loaded.images).items
    collate = with_images(sft.make_padding_collator(loaded.pad_id), loaded.images)
    ours = collate(list(sft.dataset(examples)))
    batch = DataCollatorForVisionLanguageModeling(loaded.images.processor, completion_only_loss=True)(theirs)
    given = image_inputs(loaded.model, {key: value for key, value in ours.items() if key != "labels"})
    with torch.no_grad():
        loss = loaded.model(**given, labels=ours["labels"]).loss
        expected = loaded.model(**batch).loss
    assert (ours["labels"] != sft.IGNORED).sum() == (batch["labels"] != sft.IGNORED).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)


GROUP, LENGTHS, REWARDS = 2, (4, 2, 3, 6), (1.0, 0.0, 0.25, 0.75)


@pytest.mark.parametrize("kind", ["tiny-vision", "qwen2_5_vl"])
def test_grpo_loss_and_gradient_match_trl(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts with an image each and two completions of each; the old policy differs, so some ratios are
    clipped.

    TRL's trainer computes advantages, log-probs and loss; ours pads, and packs.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows, theirs = [], []
    for n, color in enumerate(("red", "green")):
        Pillow.new("RGB", (40, 24 + 8 * n), color).save(tmp_path / f"{color}.png")
        rows.append({"prompt": "what" + "?" * n, "image": f"{color}.png"})
        asked = [{"role": "user", "content": "what" + "?" * n}]
        theirs += [{"prompt": asked, "image": Pillow.open(tmp_path / f"{color}.png")}] * GROUP
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    loaded = load(Model(path=path, vision="all"), tmp_path, training=True)
    assert loaded.images is not None
    data = Data(source=str(tmp_path / "rows.jsonl"))
    prompts = prepare_prompts(data, loaded.tokenizer, tmp_path, reader=loaded.images).items
    each = [prompt for prompt in prompts for _ in range(GROUP)]
    done = [[20 + 7 * n + i for i in range(length)] for n, length in enumerate(LENGTHS)]
    trainer = GRPOTrainer(
        model=loaded.model,
        processing_class=loaded.images.processor,
        reward_funcs=lambda completions, **_: list(REWARDS)[: len(completions)],
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(done),
            num_generations=GROUP,
            max_completion_length=8,
            loss_type="grpo",
        ),
        train_dataset=Dataset.from_list(theirs),
        rollout_func=lambda *_: {"prompt_ids": [list(p.ids) for p in each], "completion_ids": done, "logprobs": None},
    )
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(theirs)
    old = torch.randn((len(done), max(LENGTHS)), generator=torch.Generator().manual_seed(0)) * 0.3 - 4.5
    named = ("q_proj.weight", "patch_embed.proj.weight", "patch_embedding.weight")
    weights = [p for n, p in loaded.model.named_parameters() if n.endswith(named)]
    expected = trainer._compute_loss(loaded.model, {**batch, "old_per_token_logps": old})
    of_theirs = torch.autograd.grad(expected, weights)

    ours = RolloutBatch(
        group_ids=torch.arange(len(done)) // GROUP,
        mask=torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None],
        rewards=torch.tensor(REWARDS, dtype=torch.float64),
        correct=torch.tensor(REWARDS, dtype=torch.float64),
        components={},
        reward_weights={},
        truncated=torch.zeros(len(done), dtype=torch.bool),
        old_logp=old,
    )
    ids = tuple(np.array([*prompt.ids, *words]) for prompt, words in zip(each, done, strict=True))
    shown = tuple(prompt.images.shown if prompt.images else () for prompt in each)
    sequences = Sequences(ids, tuple(len(prompt.ids) for prompt in each), shown)
    objective = preset_objective("grpo", rollout={"max_new_tokens": 8})
    ours = objective.compute_advantages(ours)
    assert use_packed_attention(loaded.model)
    for packed in (False, True):
        scores = completion_scores(
            loaded.model, sequences, max(LENGTHS), packed=packed, share=packed, reader=loaded.images
        )
        loss, _ = objective.loss(ours, scores["logp"], objective.totals(ours))
        assert float(loss) == pytest.approx(float(expected), rel=1e-4), packed
        for found, wanted in zip(torch.autograd.grad(loss, weights), of_theirs, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())), packed
