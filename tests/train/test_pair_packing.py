"""Pairs packed in one line that share their prompt: equal to padded rows, with rows of a step balanced by tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.data.render import Pair
from posttrain.models import load as models
from posttrain.recipe.sections import Model
from posttrain.run.metrics import read_metrics
from posttrain.train import load_balancing, pair_packing, preference
from posttrain.train.attention import _attend_row
from posttrain.train.hf_trainer import Job

from .vision_families import prompts_of, save_seeing

PAIRS = [
    Pair("a", (5, 6, 7, 8), (9, 10, 11), (12, 13)),
    Pair("b", (5,), (9, 10), (12, 13, 14, 15, 16)),  # no shared prompt
    Pair("c", (6, 7, 8, 9, 10, 11), (12,), (13,)),
    Pair("d", (), (12, 14), (13, 15, 16)),  # the first token of a row has no predecessor
]


def trainer_of(dpo_recipe: Any, directory: Any, tmp_path: Any, model: Any, *, packed: bool) -> Any:
    recipe = dpo_recipe(model=model, batch={"size": 4, "micro_size": 4})
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    if packed:
        assert pair_packing.packs_exactly(loaded, PAIRS)
    job = Job.of(recipe, directory, loaded, len(PAIRS))
    return preference.make_trainer(job, PAIRS, lambda batch: batch, packed=packed)


@pytest.mark.parametrize("model", [{"path": "tiny"}, {"path": "tiny", "lora": {"rank": 4}}], ids=["full", "lora"])
def test_log_probs_and_gradients_equal_padded_rows(dpo_recipe, opened, tmp_path, model):
    """Different weights on all eight rows, so that attention between rows would change a gradient."""
    weights = torch.arange(1.0, 9.0)
    found = []
    for packed in (False, True):
        with opened(f"run{packed}") as directory:
            trainer = trainer_of(dpo_recipe, directory, tmp_path, model, packed=packed)
            batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
            logps = preference.summed_logps(trainer.model, batch)
            (logps * weights).sum().backward()
            lengths = preference.scored_lengths(batch).tolist()
            grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
            found.append((logps.detach(), lengths, grads))
            assert trainer.denominator([batch]) == 4
    (padded, lengths, wanted), (line, own_lengths, grads) = found
    torch.testing.assert_close(line, padded, rtol=1e-5, atol=1e-5)
    assert own_lengths == lengths == [3, 2, 1, 1, 2, 5, 1, 2]
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_prompt_is_in_the_line_once():
    """Pair a: 4 + 3 tokens, then the prompt's last token again and 2: 10 instead of 13."""
    batch = pair_packing.make_packing_collator(torch.device("cpu"))([{f"{n}_ids": list(getattr(PAIRS[0], f"{n}_ids"))
                                                       for n in ("prompt", "chosen", "rejected")}])  # fmt: skip
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 8, 12, 13]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, -100, -100, -100, 9, 10, 11, -100, 12, 13]]
    assert batch["packed"].keys.sources.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 7, 8, 9]
    assert (batch["packed"].lengths, batch["packed"].keys.lengths) == ((7, 3), (7, 6))
    assert batch["row_tokens"].tolist() == [7, 6]


def test_sliding_window_counts_from_the_end_of_the_row():
    """Keys of other rows beyond the window change nothing; keys within it do."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    before = _attend_row(q, k, v, None, 3, gqa=False)
    far, near = k.clone(), k.clone()
    far[:, :, 0] += 1  # the first query is token 3 of 0 to 4 and sees 1, 2, 3
    near[:, :, 1] += 1
    torch.testing.assert_close(_attend_row(q, far, v, None, 3, gqa=False), before)
    assert not torch.allclose(_attend_row(q, near, v, None, 3, gqa=False)[:, :, 0], before[:, :, 0])


def test_architecture_that_leaks_between_rows_is_padded(monkeypatch):
    """The trial detects a model that adds the mean of the line to every token."""
    loaded = models.load(Model(path="tiny"), Path.cwd(), seed=0, training=True)
    assert pair_packing.packs_exactly(loaded, PAIRS[:1])
    layer = loaded.model.model.layers[0]
    original = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x, **kw: original(x + x.mean(1, keepdim=True), **kw))
    assert not pair_packing.packs_exactly(loaded, PAIRS[:1])


@pytest.mark.slow
def test_bidirectional_image_tokens_are_padded(tmp_path):
    loaded = models.load(Model(path=str(save_seeing("gemma3", tmp_path / "gemma3"))), tmp_path, seed=0, training=True)
    about = [Pair("0", prompts_of(loaded)[0].ids, (9, 10), (11,), prompts_of(loaded)[0].images.shown)]
    assert pair_packing.packs_exactly(loaded, PAIRS[:1]) and not pair_packing.packs_exactly(loaded, about)


@pytest.mark.parametrize("kind", ["tiny-vision", "qwen2_5_vl"])
def test_pairs_with_images_equal_padded_rows(dpo_recipe, opened, tmp_path, kind):
    """Two images in one prompt, one in another, none in the third; log-probs of each side, and gradients of the tower.
    Height and width positions continue after a prompt for both of its sides."""
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    recipe = dpo_recipe(model={"path": path, "vision": "all"}, batch={"size": 4, "micro_size": 4})
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    sides = [((9, 10, 11), (12, 13)), ((9,), (12, 13, 14, 15)), ((12,), (13,))]
    pairs = [
        Pair(prompt.uid, prompt.ids, *side, prompt.images.shown if prompt.images else ())
        for prompt, side in zip(prompts_of(loaded), sides, strict=True)
    ]
    assert pair_packing.packs_exactly(loaded, pairs)
    weights, found = torch.arange(1.0, 7.0), []
    for packed in (False, True):
        with opened(f"run{packed}") as directory:
            job = Job.of(recipe, directory, loaded, len(pairs))
            trainer = preference.make_trainer(job, pairs, lambda batch: batch, packed=packed)
            batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(pairs))])
            logps = preference.summed_logps(trainer.model, batch)
            trained = [p for p in loaded.model.parameters() if p.requires_grad]
            grads = torch.autograd.grad((logps * weights).sum(), trained, allow_unused=True)
            found.append((logps.detach(), grads))
    (padded, wanted), (line, grads) = found
    torch.testing.assert_close(line, padded, rtol=1e-5, atol=2e-5)
    assert any(grad is not None and grad.any() for grad in grads)
    for one, other in zip(grads, wanted, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    words = [dataclasses.replace(pairs[0], prompt_ids=pairs[0].prompt_ids[:-5])]
    assert words[0].prompt_ids[-1] in loaded.images.token_ids and not pair_packing.packs_exactly(loaded, words)


def test_packed_run_equals_padded_run(dpo_recipe, opened, tmp_path, monkeypatch):
    """The whole stage, as on a GPU: losses, margins and counts of six steps."""
    with opened("padded") as directory:
        preference.run(dpo_recipe(), directory)
    monkeypatch.setattr(preference, "enable_packing", lambda loaded, pairs: pair_packing.packs_exactly(loaded, pairs))
    with opened("packed") as directory:
        preference.run(dpo_recipe(), directory)
    for padded, line in zip(read_metrics(tmp_path / "padded"), read_metrics(tmp_path / "packed"), strict=True):
        for name in ("loss", "grad_norm", "rewards/margins", "logps/rejected", "num_tokens", "trained_ratio"):
            assert line[name] == pytest.approx(padded[name], rel=5e-4, abs=2e-6), name


def test_rows_of_a_step_are_balanced_by_tokens():
    """Longest first; or 9 | 8 | then 5 goes to 8's line, 4 to 9's, 1 to the lighter one."""
    lengths = [1, 9, 4, 8, 5]
    assert load_balancing.sort_by_length(lengths, [0, 1, 2, 3, 4], 3) == [1, 3, 4, 2, 0]
    assert load_balancing.balance_micro_batches(lengths, [0, 1, 2, 3, 4], 3) == [1, 2, 0, 3, 4]
    assert load_balancing.balance_micro_batches(lengths, [4], 3) == [4]
