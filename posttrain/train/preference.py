"""Preference optimization: TRL's DPOTrainer with posttrain's pair losses.

The reference is the policy as it was loaded; a recipe may name another model (`anchors`), or the data may contain the
reference's log-probs. Summed log-probs of every pair are computed once, before the first step, and stored in the run
directory. So no second model is ever in memory, and a loss without a reference costs nothing extra.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head

from posttrain import registry, source_locations, terminal
from posttrain.batch import PairBatch, PairLoss
from posttrain.data.prepare import Prepared, prepare_pairs
from posttrain.data.render import Pair
from posttrain.errors import RecipeError, UserError
from posttrain.loss.pair_labels import kl_baseline
from posttrain.models import load as models
from posttrain.models.adapters import causal_of
from posttrain.models.load import LoadedModel
from posttrain.recipe.checks import refuse_with_images
from posttrain.recipe.eval_sections import held_out_data
from posttrain.recipe.stages import DpoRecipe
from posttrain.rollout.hf import eval_mode
from posttrain.run.directory import RunDirectory
from posttrain.seeds import derive
from posttrain.train import (
    data_parallel,
    distributed,
    evaluation,
    hf_trainer,
    load_balancing,
    machine_checks,
    pair_columns,
    pair_packing,
    rank_consistency,
    reference_models,
    sharding,
    stored_logps,
)
from posttrain.train.attention import PADDED_NOTE, cannot_split_error
from posttrain.train.context_split import is_split
from posttrain.train.evaluation import Measure
from posttrain.train.held_out import prepare_held_out, rows_evaluation
from posttrain.train.hf_trainer import Job, RunLoop
from posttrain.train.image_batches import IMAGES, image_column, with_images
from posttrain.train.library_logging import quiet
from posttrain.train.online_kl import Answers, OnlinePolicy, pairs_of
from posttrain.train.pair_logps import (
    pair_batch,
    reference_logps,
    scored_lengths,
    single_batch,
    summed_logps,
    take_side,
)
from posttrain.train.row_plan import row_plan
from posttrain.train.start_notes import shared_rows_note
from posttrain.train.trl_trainer import build_trainer, fuse_divided_head

TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")
MAX_LENGTH_RATIO = 10  # pairs whose sides differ more in length mostly teach length
COLUMNS = ("loss", "rewards/accuracies", "rewards/margins", "grad_norm", "lr", "time/tokens_per_s")
REWARD_METRICS = {
    "chosen_rewards": "rewards/chosen",
    "rejected_rewards": "rewards/rejected",
    "margins": "rewards/margins",
    "accuracy": "rewards/accuracies",
}


def run(recipe: DpoRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train from the newest complete checkpoint (or the start), save the final model and return the summary."""
    if recipe.batch.packing:
        raise RecipeError("batch.packing is for sft only: a pair has two rows whose log-probs are summed separately")
    quiet()
    machine_checks.check(recipe)
    component = registry.resolve("pair_loss", recipe.loss.use, recipe.base_dir)
    wanted = pair_columns.needs_of_loss(component, recipe.loss.params)
    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    single = "labels" in wanted
    reader = models.load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prepared = prepare_pairs(recipe.data, tokenizer, recipe.base_dir, single=single, rules=recipe.pairs, reader=reader)
    refuse_with_images(recipe, prepared.rows)
    rank_consistency.check_rows([pair.uid for pair in prepared.items])
    columns = columns_of(recipe, directory, prepared, wanted, tokenizer)
    missing = [n for n in pair_columns.STARTING_POLICY if n in wanted and pair_columns.ANCHORS[n][0] not in columns]
    held_out = prepare_held_out(recipe, tokenizer)
    unseen = validation_pairs(recipe, tokenizer, wanted, missing)
    loaded = sharding.load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
    packed = not single and enable_packing(loaded, prepared.items)
    job = job_of(recipe, directory, loaded, prepared.items, packed=packed)
    pair_loss = functools.partial(component.function, **recipe.loss.params)
    trainer = make_trainer(job, prepared.items, pair_loss, columns, packed=packed)
    trainer.single = single
    if recipe.online_kl is not None:
        trainer.online = OnlinePolicy(loaded, recipe.online_kl, prepared.items)
        trainer.train_dataset = trainer.train_dataset.add_column("pair", list(range(len(prepared.items))))
    if missing:
        trainer.use_reference(prepared.items, directory.path / "reference.safetensors", missing)
    losses = [trainer.validation_loss(unseen.items, directory.path, bool(missing))] if unseen else []
    unpacked = loaded.device.type == "cuda" and not single and not packed
    notes = [
        *([PADDED_NOTE] if unpacked else []),
        hf_trainer.rows_note(prepared, "row" if single else "pair"),
        shared_rows_note(prepared.kept_rows, held_out or unseen),
        pair_columns.origin_note(wanted, columns, loaded.source, recipe.anchors),
        pair_columns.labels_note(columns["label"], recipe.loss.params) if single else lengths_note(prepared.items),
    ]
    with rows_evaluation(recipe, directory, loaded, held_out, losses, terminal.note) as job.evaluation:
        return hf_trainer.train(trainer, job, COLUMNS, notes)


def validation_pairs(
    recipe: DpoRecipe, tokenizer: Any, wanted: frozenset[str], missing: Sequence[str]
) -> Prepared[Pair] | None:
    """Return the held-out pairs for the validation loss; None without evaluation, or if only completions are evaluated.

    wanted: what the loss reads besides the pairs. missing: the part of it that the starting policy provides. Raises
    RecipeError for a loss that reads more, if nothing else is evaluated.
    """
    if recipe.eval is None:
        return None
    if set(wanted) - set(missing) or set(missing) - {"ref_logp"} or recipe.online_kl is not None:
        if recipe.eval.generates:
            return None
        raise RecipeError(
            f"eval: the loss {recipe.loss.use} reads more than pairs and the starting policy, so that it has no"
            " validation loss",
            hint="write `n: 1` and `rewards` in `eval`, or remove it",
        )
    data = held_out_data(recipe.data, recipe.eval.data)
    reader = models.load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    return prepare_pairs(data, tokenizer, recipe.base_dir, rules=recipe.pairs, reader=reader)


def columns_of(
    recipe: DpoRecipe, directory: RunDirectory, prepared: Prepared[Pair], wanted: frozenset[str], tokenizer: Any
) -> pair_columns.Columns:
    """Return what the loss reads besides the texts: columns of the data, and log-probs under the `anchors` models."""
    rows = {row["uid"]: row for row in prepared.rows}
    found = pair_columns.read([rows[pair.uid] for pair in prepared.items], wanted, recipe.loss.use)
    if "labels" in wanted:
        pair_columns.refuse_one_class(found["label"], recipe.loss.use)
    measure = functools.partial(measure_reference_logps, recipe, prepared.items)
    return found | reference_models.columns(recipe, directory, prepared.items, found, tokenizer, measure)


def job_of(
    recipe: DpoRecipe, directory: RunDirectory, loaded: LoadedModel, pairs: Sequence[Pair], *, packed: bool
) -> Job:
    """Return the job of training on these pairs. Raises DataError for a pair longer than the model's window."""
    longest = max(pairs, key=pair_length)
    hf_trainer.check_window(loaded, longest.uid, pair_length(longest))
    job = Job.of(recipe, directory, loaded, len(pairs), pair_length(longest))
    tokens, order = [pair_length(pair) for pair in pairs], load_balancing.sort_by_length
    if packed:  # a line has the prompt, both sides, and the prompt's last token once more
        tokens = [len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids) + 1 for pair in pairs]
        order = load_balancing.balance_micro_batches
    job.order = functools.partial(order, tokens)
    return job


def enable_packing(loaded: LoadedModel, pairs: Sequence[Pair]) -> bool:
    """Return whether to pack pairs without padding: on a GPU, where it saves time, if the architecture allows it.

    Raises ModelError if ranks divide lines among them and the architecture does not allow packing.
    """
    split = is_split(causal_of(loaded.model))
    found = (split or loaded.device.type == "cuda") and pair_packing.packs_exactly(loaded, pairs)
    if split and not found:
        raise cannot_split_error()
    return found


def make_trainer(
    job: Job,
    pairs: Sequence[Pair],
    pair_loss: Callable[..., PairLoss],
    columns: pair_columns.Columns | None = None,
    *,
    packed: bool = False,
) -> Preference:
    """Build the TRL trainer for these pairs.

    pair_loss: takes a PairBatch; the recipe's arguments are already bound. columns: further fields of that batch, one
    value per pair. packed: lay pairs out in one line without padding (`attention.use_packed_attention` has switched the
    model).
    """
    padded = DataCollatorForPreference(pad_token_id=job.loaded.pad_id)
    collate = pair_packing.make_packing_collator(job.loaded.device) if packed else padded
    if job.loaded.images is not None:
        collate = with_images(collate, job.loaded.images, copies=1 if packed else 2)
    options = {
        # Keeps TRL from loading a second model; posttrain computes the reference. With LoRA, TRL loads none anyway.
        "precompute_ref_log_probs": not job.loaded.is_lora,
        "disable_dropout": False,  # the recipe decides about dropout
        "router_aux_loss_coef": 0.0,  # no load-balancing term on preference pairs
    }
    rows, collator = dataset(pairs, columns or {}), functools.partial(collate_pairs, collate)
    with disable_weight_hash():
        trainer = build_trainer(Preference, DPOConfig, job, options, train_dataset=rows, data_collator=collator)
    add_log_probs(job.loaded)
    trainer.pair_loss = pair_loss
    if job.loaded.is_lora and "ref" in job.loaded.model.peft_config:
        job.loaded.model.delete_adapter("ref")  # TRL's copy of the starting adapter, not needed here
    return trainer


@contextlib.contextmanager
def disable_weight_hash() -> Iterator[None]:
    """Context manager that stops TRL from hashing all weights to name its own cache of reference log-probs.

    posttrain has another cache. Hashing a large model takes long, and a sharded one cannot be hashed.
    """
    before = dpo_trainer.hash_module
    dpo_trainer.hash_module = lambda module: ""  # noqa: ARG005
    try:
        yield
    finally:
        dpo_trainer.hash_module = before


def add_log_probs(loaded: LoadedModel) -> None:
    """Make the model return only the log-probs of its labels; by default TRL's head computes entropies as well."""
    add_fused_lm_head(causal_of(loaded.model), outputs=("log_probs",))
    fuse_divided_head(causal_of(loaded.model))


def dataset(pairs: Sequence[Pair], columns: Mapping[str, Sequence[Any]] | None = None) -> Dataset:
    """Return a dataset with the columns TOKENS of the pairs, their images, and the given columns."""
    tokens = {name: [list(getattr(pair, name)) for pair in pairs] for name in TOKENS}
    return Dataset.from_dict({**tokens, **image_column([pair.images for pair in pairs]), **(columns or {})})


def collate_pairs(collate: Callable[[list[Any]], dict[str, Tensor]], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Apply `collate` to the tokens. Other columns become tensors [P], or [J,P] for a history of J policies."""
    batch = collate([{name: row[name] for name in (*TOKENS, IMAGES) if name in row} for row in rows])
    others = {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if name not in (*TOKENS, IMAGES)}
    return {**batch, **{name: value.mT if value.dim() == 2 else value for name, value in others.items()}}


class Preference(RunLoop, DPOTrainer):
    """DPOTrainer in posttrain's loop: TRL's collator and head, posttrain's pair loss, averaged over a step's pairs."""

    loss_is_scaled_for_ga = True  # compute_loss divides by the pairs of the step, not of the micro-batch
    pair_loss: Callable[[PairBatch], PairLoss]
    single = False  # rows are labeled answers; the rejected side only measures the policy's KL to its reference
    mean_chosen_length: float | None = None  # of the step
    kl_baseline: Tensor | None = None  # of the step, for single answers
    online: OnlinePolicy | None = None  # samples answers to the prompts, for a KL on the policy's own answers
    answers: Mapping[int, Answers] = {}  # of the step, by micro-batch
    train_dataset: Dataset

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset  # already tokenized

    def _precompute_ref_logps(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset  # `use_reference` adds them if the loss needs them

    def use_reference(self, pairs: Sequence[Pair], cache: Path, needs: Sequence[str] = ("ref_logp",)) -> None:
        """Add the columns of `needs` (ref_chosen_logp, ref_rejected_logp, ...), computed with the current policy.

        Call this before the first step. A resumed run reads the columns from `cache` if that was written for the same
        pairs.
        """
        logps = self._reference_of(pairs, self.train_dataset, cache)
        for need in needs:
            for field, values in reference_models.columns_of_logps(need, logps).items():
                self.train_dataset = self.train_dataset.add_column(field, values)

    def validation_loss(self, pairs: Sequence[Pair], folder: Path, reads_reference: bool) -> Measure:
        """Return a function that computes the mean loss and loss metrics of held-out pairs.

        Call this before the first step, since the reference is the current policy. folder: where its log-probs are
        stored for a resumed run.
        """
        longest = max(pairs, key=pair_length)
        hf_trainer.check_window(self.job.loaded, longest.uid, pair_length(longest))
        rows, micro = dataset(pairs), self.job.plan.micro
        if reads_reference:
            logps = self._reference_of(pairs, rows, folder / "eval_reference.safetensors")
            for field, values in reference_models.columns_of_logps("ref_logp", logps).items():
                rows = rows.add_column(field, values)
        batches = evaluation.batches_of([pair_length(pair) for pair in pairs], micro)
        mean_length = sum(len(pair.chosen_ids) for pair in pairs) / len(pairs)

        def sums(inputs: dict[str, Any]) -> dict[str, float]:
            batch = pair_batch(self.job.loaded.model, inputs)
            result = self.pair_loss(dataclasses.replace(batch, mean_chosen_length=mean_length))
            stats = {name: float(value.float().sum()) for name, value in pair_metrics(result.stats).items()}
            return {"loss": float(result.losses.sum()), "pairs": float(len(result.losses)), **stats}

        def measure(_: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
            found = evaluation.sum_over_rows(self.job.loaded, rows, batches, self.data_collator, sums)
            count = found.pop("pairs")
            return {name: value / count for name, value in found.items()}, []

        return measure

    def _reference_of(self, pairs: Sequence[Pair], rows: Dataset, cache: Path) -> Mapping[str, Tensor]:
        """Compute summed log-probs of the pairs under the current policy, or read them from `cache` if stored there."""
        compute = functools.partial(reference_logps, self.job.loaded, self.job.plan.micro, rows, self.data_collator)
        return stored_logps.read_or_compute(cache, reference_models.tokens_of(pairs), compute)

    def denominator(self, batches: Sequence[dict[str, Tensor]]) -> int:
        return sum(len(scored_lengths(batch)) // 2 for batch in batches)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Like RunLoop; also sets what losses read of the whole step, so that they do not depend on micro-batches."""
        batches, pairs = super().get_batch_samples(epoch_iterator, num_batches, device)
        lengths = sum(int(scored_lengths(batch).chunk(2)[0].sum()) for batch in batches)
        self.mean_chosen_length = max(lengths, 1) / int(pairs)
        if self.single:
            self.kl_baseline = self._step_kl_baseline(batches)
        if self.online is not None:
            seed = derive(self.job.recipe.run.seed, "online_kl", self.job.state.step)
            parts = [pairs_of(batch) for batch in batches]
            self.watchdog.enter("rollout")
            self.answers = self.online.sample_answers(parts, self.own_batches, seed)
            self.watchdog.leave()
            self.watchdog.enter("update")
        return batches, pairs

    def _step_kl_baseline(self, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        """Compute the KL baseline of the step, one number for all ranks; each rank runs a share of the rejected sides.

        Runs without dropout, like the reference.
        """
        loaded = self.job.loaded
        parts = data_parallel.my_pass_shard(len(batches))
        idle = sharding.idle_passes(len(parts), loaded.is_sharded)
        rows: list[tuple[float, float]] = []
        with torch.no_grad(), eval_mode(loaded.model), loaded.autocast():
            for part in parts:
                logps = summed_logps(loaded.model, send_to_device(take_side(batches[part], 1), loaded.device))
                rows += zip(logps.tolist(), batches[part]["ref_rejected_logp"].tolist(), strict=True)
            for _ in range(idle):
                summed_logps(loaded.model, send_to_device(take_side(batches[-1], 1), loaded.device))
        every = [row for part in distributed.gather(rows)[:: data_parallel.model_parallel_size()] for row in part]
        logps, reference = torch.tensor(every, device=loaded.device).unbind(1)
        return kl_baseline(logps, reference)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute this micro-batch's part of the step's mean pair loss."""
        del return_outputs
        with self.job.loaded.autocast():
            batch = single_batch(model, inputs) if self.single else pair_batch(model, inputs)
        batch = dataclasses.replace(batch, mean_chosen_length=self.mean_chosen_length, kl_baseline=self.kl_baseline)
        result = self.pair_loss(batch)
        if not isinstance(result, PairLoss) or result.losses.shape != batch.chosen_logp.shape:
            raise UserError("the pair loss must return a PairLoss with one loss per pair (posttrain.batch.PairLoss)")
        self._add_metrics(batch, result, inputs)
        loss = result.losses.sum()
        if self.online is not None:
            with self.job.loaded.autocast():
                term, kl = self.online.loss_term(model, self.answers[self.batches_seen])
            loss = loss + term
            self.add("online_kl/kl", kl)
        return loss / num_items_in_batch

    def _add_metrics(self, batch: PairBatch, result: PairLoss, inputs: Mapping[str, Tensor]) -> None:
        self.add("pairs", len(batch.chosen_logp))
        self.add("tokens", inputs["row_tokens" if "row_tokens" in inputs else "attention_mask"].sum())
        self.add("trained", scored_lengths(inputs).sum())
        metrics = {"logps/chosen": batch.chosen_logp, "logps/rejected": batch.rejected_logp}
        metrics |= pair_metrics(result.stats)
        if self.single and batch.label is not None:
            good = batch.label > 0.5
            self.add("good", good.sum())
            metrics = split_by_label(metrics, good)
        for name, value in metrics.items():
            self.add(name, value.float().sum())

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float | None]:
        """Return means over the pairs; for labeled answers, over the good or the bad rows (None if there are none)."""
        good = sums.get("good", sums["pairs"])
        rows = {"chosen": good, "rejected": sums["pairs"] - good} if self.single else {}
        counts = {name: rows.get(name.rpartition("/")[2], sums["pairs"]) for name in sums if "/" in name}
        means = {name: sums[name] / count if count else None for name, count in counts.items()}
        if self.single:
            sides = means.get("rewards/chosen"), means.get("rewards/rejected")
            means["rewards/margins"] = None if None in sides else sides[0] - sides[1]  # type: ignore[operator]
        return means


def split_by_label(metrics: Mapping[str, Tensor], good: Tensor) -> dict[str, Tensor]:
    """Split `NAME/chosen` [P] of labeled answers: `NAME/chosen` gets the good rows, `NAME/rejected` the bad rows."""
    sides = {name: value for name, value in metrics.items() if name.endswith("/chosen")}
    others = {name: value for name, value in metrics.items() if not name.endswith(("/chosen", "/rejected"))}
    bad = {name.removesuffix("chosen") + "rejected": value * ~good for name, value in sides.items()}
    return {**{name: value * good for name, value in sides.items()}, **bad, **others}


def pair_metrics(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the stats [P] of a pair loss to TRL's metric names where TRL has one, else to loss/NAME."""
    return {REWARD_METRICS.get(name, f"loss/{name}"): value for name, value in stats.items()}


def measure_reference_logps(recipe: DpoRecipe, pairs: Sequence[Pair], loaded: LoadedModel) -> dict[str, Tensor]:
    """Compute `reference_logps` with a model other than the one in training."""
    add_log_probs(loaded)
    plain = DataCollatorForPreference(pad_token_id=loaded.pad_id)
    collate = functools.partial(
        collate_pairs, plain if loaded.images is None else with_images(plain, loaded.images, copies=2)
    )
    return reference_logps(loaded, row_plan(recipe, len(pairs)).micro, dataset(pairs), collate)


def lengths_note(pairs: Sequence[Pair]) -> str:
    """Return one line that says how far length alone separates the chosen sides from the rejected ones."""
    chosen, rejected = (
        [len(ids) for ids in side] for side in zip(*((p.chosen_ids, p.rejected_ids) for p in pairs), strict=True)
    )
    longer = sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(pairs)
    means = f"{sum(chosen) / len(pairs):.1f} tokens chosen, {sum(rejected) / len(pairs):.1f} rejected on average"
    note = f"{means}; the chosen side is longer in {longer:.0%} of the pairs"
    uneven = [
        pair.uid for pair, c, r in zip(pairs, chosen, rejected, strict=True) if max(c, r) > MAX_LENGTH_RATIO * min(c, r)
    ]
    if not uneven:
        return note
    which = source_locations.describe_rows(uneven)
    return f"{note}; LOOK: in {len(uneven)} one side is over {MAX_LENGTH_RATIO} times as long as the other ({which})"


def pair_length(pair: Pair) -> int:
    """Return the tokens of the prompt with the longer side."""
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))
