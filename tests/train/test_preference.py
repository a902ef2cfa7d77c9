"""Preference training on `tiny`: TRL's loss on a shared batch, the reference in each setting, micro-batches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer

from posttrain import registry
from posttrain.data.prepare import prepare_pairs
from posttrain.errors import Interrupted, RecipeError, UserError
from posttrain.models import load as models
from posttrain.run.metrics import read_metrics
from posttrain.train import hf_trainer, preference, reference_models, stored_logps
from posttrain.train.hf_trainer import Job

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")
LORA = {"path": "tiny", "lora": {"rank": 4}}


def prepare_job(recipe: Any, tmp_path: Any) -> tuple[Any, Any]:
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    return loaded, prepare_pairs(recipe.data, loaded.tokenizer, tmp_path).items


@pytest.mark.parametrize("model", [{"path": "tiny"}, LORA], ids=["full", "lora"])
def test_dpo_loss_starts_at_log_2_and_falls(dpo_recipe, rows_of, model):
    rows = rows_of(preference.run, dpo_recipe(model=model, run={"steps": 15}))
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["loss"] < 0.5
    assert rows[-1]["rewards/accuracies"] > 0.9
    last = rows[-1]
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5)


def test_loss_and_gradients_equal_those_of_trl(dpo_recipe, opened, tmp_path):
    """One batch of 6 pairs, a policy moved away from its reference, beta 0.3: TRL's sigmoid loss with a reference model
    against our dpo with precomputed log-probs."""
    recipe = dpo_recipe(loss={"beta": 0.3}, batch={"size": 6, "micro_size": 6})
    loaded, pairs = prepare_job(recipe, tmp_path)
    reference = copy.deepcopy(loaded.model)
    with opened() as directory:
        job = Job.of(recipe, directory, loaded, len(pairs))
        loss = registry.resolve("pair_loss", "dpo").function
        ours = preference.make_trainer(job, pairs, lambda batch: loss(batch, **recipe.loss.params))
        ours.use_reference(pairs, tmp_path / "reference.safetensors")
        move(loaded.model)
        theirs = stock_trainer(copy.deepcopy(loaded.model), reference, loaded, pairs, tmp_path)

        batch = ours.data_collator([ours.train_dataset[n] for n in range(6)])
        ours.sums = {}
        values = []
        for trainer in (ours, theirs):
            trainer.model.zero_grad()
            value = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(6))
            value.backward()
            values.append((value.item(), [p.grad for p in trainer.model.parameters()]))
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-6)
    assert abs(values[0][0] - math.log(2)) > 0.01
    for mine, other in zip(values[0][1], values[1][1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)
    for name in ("rewards/chosen", "rewards/margins", "logps/rejected"):
        assert float(ours.sums[name]) / 6 == pytest.approx(theirs._metrics["train"][name][-1], rel=1e-4), name


def move(model: torch.nn.Module) -> None:
    """Add noise to every weight, so that the policy differs from its reference."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))


def stock_trainer(model: Any, reference: Any, loaded: Any, pairs: Any, tmp_path: Any) -> DPOTrainer:
    """Return TRL's unmodified DPOTrainer, except for tokenization, which our renderer did."""

    class Stock(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    args = DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.3, per_device_train_batch_size=6, max_length=None,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    rows = preference.dataset(pairs)
    return Stock(model, reference, args, train_dataset=rows, processing_class=loaded.tokenizer)


def test_the_reference_under_lora_is_the_base_without_adapter(dpo_recipe, opened, tmp_path):
    """After training, log-probs with the adapter disabled still equal the precomputed ones."""
    recipe = dpo_recipe(model=LORA)
    loaded, pairs = prepare_job(recipe, tmp_path)
    with opened() as directory:
        job = Job.of(recipe, directory, loaded, len(pairs))
        loss = registry.resolve("pair_loss", "dpo").function
        trainer = preference.make_trainer(job, pairs, loss)
        assert list(loaded.model.peft_config) == ["default"]
        trainer.use_reference(pairs, directory.path / "reference.safetensors")
        before = load_file(directory.path / "reference.safetensors")
        hf_trainer.train(trainer, job, preference.COLUMNS, [])
        trained = preference.reference_logps(loaded, job.plan.micro, trainer.train_dataset, trainer.data_collator)
        with loaded.model.disable_adapter():
            base = preference.reference_logps(loaded, job.plan.micro, trainer.train_dataset, trainer.data_collator)
    assert not torch.allclose(trained["chosen"], before["chosen"], atol=1e-2)
    for side in reference_models.SIDES:
        torch.testing.assert_close(base[side], before[side], rtol=1e-5, atol=1e-5)


def test_simpo_has_no_reference(dpo_recipe, opened, tmp_path):
    with opened() as directory:
        preference.run(dpo_recipe(loss={"use": "simpo", "beta": 2.0}), directory)
        assert not (directory.path / "reference.safetensors").exists()
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_reference_free_dpo_computes_no_reference(dpo_recipe, opened):
    with opened() as directory:
        preference.run(dpo_recipe(loss={"reference_free": True}, run={"steps": 1}), directory)
        assert not (directory.path / "reference.safetensors").exists()


@pytest.mark.parametrize("use", ["dpo", "simpo"])
def test_micro_batches_change_nothing(dpo_recipe, rows_of, use):
    """20 pairs in steps of 6, one pass: the last step has 2 pairs, fewer than a forward pass of 3."""
    run = {"steps": None, "epochs": 1}
    whole = rows_of(preference.run, dpo_recipe(loss={"use": use}, run=run, batch={"size": 6, "micro_size": 6}), "whole")
    split = rows_of(preference.run, dpo_recipe(loss={"use": use}, run=run, batch={"size": 6, "micro_size": 3}), "split")
    single = rows_of(preference.run, dpo_recipe(loss={"use": use}, run=run, batch={"size": 6, "micro_size": 1}), "one")
    assert len(whole) == 4  # 6, 6, 6 and 2 pairs
    for other in (split, single):
        for row, expected in zip(other, whole, strict=True):
            for name in ("loss", "grad_norm", *REWARDS, "trained_ratio"):
                assert row[name] == pytest.approx(expected[name], rel=5e-4, abs=2e-6), (row["step"], name)


def test_resumed_run_uses_the_stored_reference(dpo_recipe, opened, rows_of, monkeypatch):
    """Resuming at step 3 of 6: metrics as unbroken, and no second reference pass."""
    unbroken = rows_of(preference.run, dpo_recipe(), "unbroken")
    recipe = dpo_recipe()
    with opened("broken") as directory:
        original = preference.Preference.log

        def stop_after_three(self, logs, start_time=None):
            self.stop.requested = self.job.state.step == 2
            original(self, logs, start_time)

        with monkeypatch.context() as patched, pytest.raises(Interrupted):
            patched.setattr(preference.Preference, "log", stop_after_three)
            preference.run(recipe, directory)
    monkeypatch.setattr(preference, "reference_logps", lambda *_: pytest.fail("computed again"))
    assert rows_of(preference.run, recipe, "broken", resume=True) == unbroken


def test_stored_reference_of_other_pairs_is_not_used(dpo_recipe, tmp_path):
    _, pairs = prepare_job(dpo_recipe(), tmp_path)
    logps = {side: torch.ones(len(pairs)) for side in reference_models.SIDES}
    stored_logps.write(tmp_path / "cache", reference_models.tokens_of(pairs), logps)
    assert torch.equal(
        stored_logps.read(tmp_path / "cache", reference_models.tokens_of(pairs))["chosen"], logps["chosen"]
    )
    assert stored_logps.read(tmp_path / "cache", reference_models.tokens_of(pairs[1:])) is None
    assert stored_logps.read(tmp_path / "missing", reference_models.tokens_of(pairs)) is None


CUSTOM = """
from posttrain.batch import PairLoss

def margin(batch, *, target: float = 1.0):
    gap = (batch.chosen_logp - batch.ref_chosen_logp) - (batch.rejected_logp - batch.ref_rejected_logp)
    losses = (gap - target) ** 2
    return PairLoss(losses, {"gap": gap.detach()})

def wrong(batch):
    return batch.chosen_logp.mean()
"""


def test_user_defined_loss_gets_the_reference(dpo_recipe, rows_of, tmp_path):
    """(0 - 2)^2 = 4 at the start, because policy and reference are equal."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    rows = rows_of(preference.run, dpo_recipe(loss={"use": "mine.py:margin", "target": 2.0}))
    assert rows[0]["loss"] == pytest.approx(4, abs=1e-4)
    assert rows[0]["loss/gap"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_loss_with_a_wrong_return_value_is_refused(dpo_recipe, opened, tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)
    with opened() as directory, pytest.raises(UserError, match="must return a PairLoss"):
        preference.run(dpo_recipe(loss={"use": "mine.py:wrong"}), directory)


def test_packing_is_refused(dpo_recipe, opened):
    with pytest.raises(RecipeError, match="packing"), opened() as directory:
        preference.run(dpo_recipe(batch={"packing": True}), directory)
