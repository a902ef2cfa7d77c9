"""Supervised fine-tuning on `tiny`: comparison with a hand-written loop, micro-batches, packing, and all ways to
stop."""

from __future__ import annotations

import functools
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from posttrain.data.prepare import prepare_examples
from posttrain.data.render import Example
from posttrain.errors import DataError, Interrupted, ModelError, NonFiniteError, RunError, UserError
from posttrain.models import load as models
from posttrain.recipe.sections import Model
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.seeds import PromptSampler
from posttrain.train import hf_trainer, load_balancing, sft
from posttrain.train.row_plan import RowOrder, RowPlan, row_plan

from .families import save_family

NUMBERS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "trained_ratio", "num_tokens", "lr")


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]], rel: float) -> None:
    assert len(rows) == len(others) > 0
    for row, other in zip(rows, others, strict=True):
        for name in NUMBERS:
            assert row[name] == pytest.approx(other[name], rel=rel, abs=1e-7), (row["step"], name)


def test_the_loss_falls_and_the_final_model_loads(sft_recipe, opened, tmp_path):
    recipe = sft_recipe(run={"steps": 30}, optim={"lr": 1e-2})
    with opened() as directory:
        summary = sft.run(recipe, directory)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert summary["steps"] == 30 and summary["loss_last"] == rows[-1]["loss"]
    reloaded = models.load(recipe.model.model_copy(update={"path": str(tmp_path / "run" / "final")}), tmp_path)
    start = models.load(recipe.model, tmp_path)
    assert not torch.equal(reloaded.model.lm_head.weight, start.model.lm_head.weight)


def test_metrics_equal_a_hand_written_loop(sft_recipe, rows_of, tmp_path):
    """4 steps: cross-entropy summed over trained tokens / their number in the step, clipping at 1, AdamW with weight
    decay on matrices only, linear warm-up over 2 steps (factors 1/3, 2/3) and then a linear schedule to step 4 (1,
    1/2)."""
    optim = {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "warmup_steps": 2, "schedule": "linear"}
    recipe = sft_recipe(run={"steps": 4}, optim=optim)
    rows = rows_of(sft.run, recipe)

    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    examples = prepare_examples(recipe.data, loaded.tokenizer, tmp_path).items
    model = loaded.model
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    order = PromptSampler(len(examples), 8, seed=0)
    for step, factor in enumerate((1 / 3, 2 / 3, 1, 1 / 2)):
        batch = [examples[i] for i in order.step(step)]
        total = sum(sum(e.trained[1:]) for e in batch)
        loss = sum(summed_nll(model, e) for e in batch) / total
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * factor
        optimizer.step()
        assert rows[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert rows[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert rows[step]["lr"] == pytest.approx(3e-3 * factor)
    final = models.load(recipe.model.model_copy(update={"path": str(tmp_path / "run" / "final")}), tmp_path).model
    for (name, ours), theirs in zip(final.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def summed_nll(model: Any, example: Example) -> torch.Tensor:
    """Return minus the log-probs of the row's trained tokens from the model's own logits, without padding."""
    ids = torch.tensor([example.ids])
    logits = model(input_ids=ids).logits[0, :-1]
    keep = torch.tensor(example.trained[1:])
    return cross_entropy(logits[keep], ids[0, 1:][keep], reduction="sum")


def test_labels_contain_only_trained_tokens():
    data = sft.dataset([Example("a", (5, 6, 7), (False, True, False)), Example("b", (8, 9), (False, True))])
    assert data["labels"][:] == [[-100, 6, -100], [-100, 9]]
    assert data["input_ids"][:] == [[5, 6, 7], [8, 9]]


def test_untrained_tokens_have_no_loss(sft_recipe, rows_of):
    """With train_on: all the prompt counts too, so loss and token count differ from the default."""
    masked = rows_of(sft.run, sft_recipe(run={"steps": 1}), "masked")
    everything = rows_of(sft.run, sft_recipe(run={"steps": 1}, data={"train_on": "all"}), "all")
    assert masked[0]["trained_ratio"] < 0.6 < everything[0]["trained_ratio"]
    assert masked[0]["loss"] != pytest.approx(everything[0]["loss"], rel=1e-3)


def test_micro_batches_change_nothing(sft_recipe, rows_of):
    whole = rows_of(sft.run, sft_recipe(batch={"size": 8, "micro_size": 8}), "whole")
    for micro in (1, 2):
        assert_same(rows_of(sft.run, sft_recipe(batch={"micro_size": micro}), f"micro-{micro}"), whole, rel=2e-4)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_packed_equals_padded(sft_recipe, rows_of, attention):
    model = {"path": "tiny", "attention": attention}
    padded = rows_of(sft.run, sft_recipe(model=model), "padded")
    packed = rows_of(sft.run, sft_recipe(model=model, batch={"packing": True}), "packed")
    assert_same(packed, padded, rel=2e-4)


@pytest.mark.parametrize("with_borders", [True, False])
def test_packed_rows_do_not_attend_to_each_other(sft_recipe, tmp_path, monkeypatch, with_borders):
    """Both ways to pack: with our attention, and with the mask that transformers derives from position_ids."""
    monkeypatch.setattr(sft, "use_packed_attention", sft.use_packed_attention if with_borders else lambda _: False)
    loaded = models.load(sft_recipe().model, tmp_path, seed=0)
    collate = sft.make_packing_collator(loaded)
    batch = collate([{"input_ids": r, "labels": r} for r in ([5, 6, 7], [8, 9])])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert ("packed" in batch) == with_borders
    rows = [[sft._row(before), sft._row([8, 9, 10])] for before in ([5, 6, 7], [30, 40, 50])]
    first, other = (sft._last_logits(loaded, collate, pair) for pair in rows)
    assert torch.equal(first, other)
    alone = sft._last_logits(loaded, collate, [sft._row([8, 9, 10])])
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-5)


def test_packing_in_chunks_of_attention_is_refused(tmp_path):
    """Llama 4 attends within chunks that start where the line starts: only rows far below the chunk size are exact."""
    base = save_family(
        "llama4_text", tmp_path / "base", attention_chunk_size=8192, layer_types=["chunked_attention"] * 2
    )
    loaded = models.load(Model(path=str(base), device="cpu"), tmp_path, training=True)
    examples = [Example(uid=f"a:{n}", ids=tuple(range(n, n + 20)), trained=(True,) * 20) for n in (5, 9)]
    with pytest.raises(ModelError, match="packing is not exact"):
        sft.check_packing(loaded, sft.make_packing_collator(loaded), examples)
    assert loaded.model.config.attention_chunk_size == 8192


def test_packing_that_leaks_is_refused(sft_recipe, tmp_path):
    loaded = models.load(sft_recipe().model, tmp_path, seed=0)
    examples = prepare_examples(sft_recipe().data, loaded.tokenizer, tmp_path).items

    def leaky(rows):
        ids = torch.tensor([[i for row in rows for i in row["input_ids"]]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    with pytest.raises(ModelError, match="packing is not exact"):
        sft.check_packing(loaded, leaky, examples)
    sft.check_packing(loaded, sft.make_packing_collator(loaded), examples)


def test_rows_are_sorted_by_length_only_with_several_micro_batches():
    """In one forward pass the order changes only the rounding, and with it the model that a later stage starts from."""
    lengths = [(7 * row) % 20 for row in range(20)]
    order = functools.partial(load_balancing.sort_by_length, lengths)
    drawn = list(RowOrder(PromptSampler(20, 10, seed=3), RowPlan(20, 10, 10), start=0))
    assert list(RowOrder(PromptSampler(20, 10, seed=3), RowPlan(20, 10, 10), start=0, order=order)) == drawn
    several = list(RowOrder(PromptSampler(20, 10, seed=3), RowPlan(20, 10, 5), start=0, order=order))
    assert [lengths[row] for row in several[:10]] == sorted((lengths[row] for row in drawn[:10]), reverse=True)


def test_epochs_contain_every_row_and_the_last_step_may_be_short(sft_recipe, rows_of):
    """20 rows, 2 passes, 12 a step: steps of 12, 12, 12 and 4 rows; each pass has each row once."""
    recipe = sft_recipe(run={"steps": None, "epochs": 2}, batch={"size": 12})
    plan = row_plan(recipe, 20)
    assert (plan.steps, plan.rows) == (4, 40)
    order = list(RowOrder(PromptSampler(20, 12, seed=3), plan, start=0))
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert list(RowOrder(PromptSampler(20, 12, seed=3), plan, start=3)) == order[36:]
    rows = rows_of(sft.run, recipe)
    assert len(rows) == 4
    assert rows[3]["num_tokens"] - rows[2]["num_tokens"] < 0.5 * rows[0]["num_tokens"]


def test_plan_of_steps(sft_recipe):
    assert row_plan(sft_recipe(), 20) == RowPlan(rows=48, size=8, micro=4)
    assert row_plan(sft_recipe(batch={"size": 6, "micro_size": None}), 20) == RowPlan(rows=36, size=6, micro=6)


def test_lora_trains_only_the_adapter_with_seeded_dropout(sft_recipe, rows_of):
    model = {"path": "tiny", "lora": {"rank": 4, "dropout": 0.3}}
    first = rows_of(sft.run, sft_recipe(model=model), "a")
    assert first == rows_of(sft.run, sft_recipe(model=model), "b")
    plain = rows_of(sft.run, sft_recipe(model={"path": "tiny", "lora": {"rank": 4}}), "no-dropout")
    assert plain[-1]["loss"] != first[-1]["loss"]


def test_nf4_base_trains_an_adapter_in_float32(sft_recipe, opened, tmp_path):
    pytest.importorskip("bitsandbytes")
    recipe = sft_recipe(model={"path": "tiny", "quantize": "nf4", "lora": {"rank": 4}}, optim={"lr": 1e-2})
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    examples = prepare_examples(recipe.data, loaded.tokenizer, tmp_path).items
    with opened() as directory:
        job = hf_trainer.Job.of(recipe, directory, loaded, len(examples))
        trainer = sft.make_trainer(job, examples, sft.make_padding_collator(loaded.pad_id))
        assert {p.dtype for p in loaded.model.parameters() if p.requires_grad} == {torch.float32}
        hf_trainer.train(trainer, job, sft.COLUMNS, [])
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]


# --- stopping


def test_run_stopped_by_ctrl_c_resumes_exactly(sft_recipe, opened, rows_of, monkeypatch):
    """Packed, so that this path resumes too; the signal arrives within step 4."""
    recipe = sft_recipe(batch={"packing": True}, run={"steps": 7})
    unbroken = rows_of(sft.run, recipe, "unbroken")
    steps = iter(range(1, 99))
    original = sft.Sft.denominator

    def interrupting(self, batches):
        if next(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batches)

    with monkeypatch.context() as patched, opened("broken") as directory:
        patched.setattr(sft.Sft, "denominator", interrupting)
        with pytest.raises(Interrupted, match="after step 4 of 7"):
            sft.run(recipe, directory)
        assert checkpoints.step_of(checkpoints.latest(directory.checkpoints)) == 4
        assert not directory.final.exists()
    assert rows_of(sft.run, recipe, "broken", resume=True) == unbroken


def test_resuming_a_finished_run_only_saves_the_model_again(sft_recipe, rows_of, tmp_path):
    rows = rows_of(sft.run, sft_recipe())
    shutil.rmtree(tmp_path / "run" / "final")
    assert rows_of(sft.run, sft_recipe(), resume=True) == rows
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_resume_with_fewer_steps_than_done_raises(sft_recipe, rows_of, tmp_path):
    """It once ended as if successful, with more steps than requested."""
    rows_of(sft.run, sft_recipe(run={"steps": 3}))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="3 steps are done already, and 1 is asked for"):
        rows_of(sft.run, sft_recipe(run={"steps": 1}), resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_max_minutes_stops_cleanly_with_a_model(sft_recipe, opened, tmp_path):
    with opened() as directory:
        summary = sft.run(sft_recipe(run={"max_minutes": 1e-6}), directory)
    assert summary["steps"] == 1
    assert len(read_metrics(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_number_of_kept_checkpoints_and_log_every(sft_recipe, opened, tmp_path):
    with opened() as directory:
        sft.run(sft_recipe(run={"save_every": 2, "keep_checkpoints": 2, "steps": 7, "log_every": 3}), directory)
        assert [p.name for p in sorted(directory.checkpoints.iterdir())] == ["step-00000006", "step-00000007"]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [3, 6, 7]


def test_nan_loss_stops_before_the_update(sft_recipe, opened, tmp_path):
    """The hidden states turn NaN in step 2; the checkpoint of step 1 stays."""
    recipe = sft_recipe(batch={"micro_size": 8}, run={"save_every": 1})
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    examples = prepare_examples(recipe.data, loaded.tokenizer, tmp_path).items
    factors = iter([1.0, math.nan])
    loaded.model.model.norm.register_forward_hook(lambda *call: call[-1] * next(factors))
    with opened() as directory:
        job = hf_trainer.Job.of(recipe, directory, loaded, len(examples))
        with pytest.raises(NonFiniteError, match="step 2: the loss is not finite") as told:
            hf_trainer.train(
                sft.make_trainer(job, examples, sft.make_padding_collator(loaded.pad_id)), job, sft.COLUMNS, []
            )
        dump = directory.path / "failed" / "step-2.pt"
        assert str(dump) in str(told.value)
        assert checkpoints.step_of(checkpoints.latest(directory.checkpoints, hashes=True)) == 1
    assert torch.load(dump)[0]["input_ids"].shape[0] == 8
    assert all(torch.isfinite(p).all() for p in loaded.model.parameters())


def test_non_finite_gradient_is_named(sft_recipe, opened, tmp_path):
    recipe = sft_recipe()
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    examples = prepare_examples(recipe.data, loaded.tokenizer, tmp_path).items
    weight = loaded.model.model.layers[1].mlp.up_proj.weight
    before = weight.detach().clone()
    weight.register_hook(lambda grad: grad * math.inf)
    with opened() as directory:
        job = hf_trainer.Job.of(recipe, directory, loaded, len(examples))
        with pytest.raises(NonFiniteError, match=r"step 1: the gradient of model\.layers\.1\.mlp\.up_proj\.weight"):
            hf_trainer.train(
                sft.make_trainer(job, examples, sft.make_padding_collator(loaded.pad_id)), job, sft.COLUMNS, []
            )
    assert torch.equal(weight, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB: one checkpoint of `tiny` (1.4 MB) fits, a second does not fit beside it."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("checked_first", [True, False])
def test_full_disk_keeps_the_last_checkpoint(sft_recipe, opened, monkeypatch, checked_first):
    """Both if the free space is checked before writing, and if writing itself fails."""
    if not checked_first:
        monkeypatch.setattr(checkpoints, "require_space", lambda *_: None)
    with opened("small/run") as directory:
        with pytest.raises(RunError, match="space"):
            sft.run(sft_recipe(run={"save_every": 2}), directory)
        last = checkpoints.latest(directory.checkpoints, hashes=True)
        assert checkpoints.step_of(last) == 2
        assert {p.name for p in directory.checkpoints.iterdir()} <= {"step-00000002", "step-00000004.partial"}


# --- refusals


def test_rows_longer_than_the_window_are_refused(sft_recipe, tmp_path):
    loaded = models.load(sft_recipe().model, tmp_path)
    hf_trainer.check_window(loaded, "3", 2048)
    with pytest.raises(DataError, match="row 3  2049 tokens; the model's window is 2048"):
        hf_trainer.check_window(loaded, "3", 2049)


def test_out_of_memory_error_has_advice(sft_recipe, opened, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sft.Sft, "denominator", fail)
    with opened() as directory, pytest.raises(RunError, match="step 1: the GPU has no memory left") as told:
        sft.run(sft_recipe(), directory)
    text = str(told.value)
    assert "predicted peak of this recipe" in text
    assert "batch.micro_size=2 (" in text and "model.gradient_checkpointing=true (" in text
