"""Supervised fine-tuning: TRL's SFTTrainer on rows that posttrain tokenized and masked.

loss = - sum of weight * log-prob over trained tokens / trained tokens of the whole optimizer step, with weight 1 unless
the recipe names another objective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from posttrain import terminal
from posttrain.batch import concatenate_ranges, to_device
from posttrain.data.prepare import prepare_examples
from posttrain.data.render import Example
from posttrain.errors import ModelError
from posttrain.loss.token_weights import weighted_nll
from posttrain.models import load as models
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.load import LoadedModel
from posttrain.recipe.checks import refuse_with_images
from posttrain.recipe.eval_sections import held_out_data
from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.hf import eval_mode
from posttrain.run.directory import RunDirectory
from posttrain.train import (
    evaluation,
    hf_trainer,
    load_balancing,
    machine_checks,
    rank_consistency,
    sharding,
    trl_trainer,
)
from posttrain.train.attention import WINDOW, Packed, cannot_split_error, short_windows, use_packed_attention
from posttrain.train.collate import IGNORED, Sequences
from posttrain.train.context_split import is_split
from posttrain.train.evaluation import Measure
from posttrain.train.held_out import prepare_held_out, rows_evaluation
from posttrain.train.hf_trainer import Job, RunLoop
from posttrain.train.image_batches import image_column, image_inputs, with_images
from posttrain.train.library_logging import quiet
from posttrain.train.logprobs import Head, token_scores
from posttrain.train.pass_checks import PROBE, verify_head
from posttrain.train.row_plan import row_plan
from posttrain.train.sft_objective import Weighing, behavior_logps, noisy_embeddings, with_behavior
from posttrain.train.sft_objective import trained_targets as trained_targets
from posttrain.train.sharding import as_forward
from posttrain.train.start_notes import shared_rows_note
from posttrain.train.trl_trainer import build_trainer

COLUMNS = ("loss", "mean_token_accuracy", "grad_norm", "lr", "time/tokens_per_s")
Collator = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]


def run(recipe: SftRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train from the newest complete checkpoint (or the start), save the final model and return the summary."""
    quiet()
    machine_checks.check(recipe)
    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    reader = models.load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prepared = prepare_examples(recipe.data, tokenizer, recipe.base_dir, reader=reader)
    refuse_with_images(recipe, prepared.rows)
    rank_consistency.check_rows([example.uid for example in prepared.items])
    held_out = prepare_held_out(recipe, tokenizer)
    unseen = None
    if recipe.eval is not None:
        section = held_out_data(recipe.data, recipe.eval.data)
        unseen = prepare_examples(section, tokenizer, recipe.base_dir, reader=reader)
    behavior = None
    if recipe.objective.behavior_model is not None:  # that model is freed before the policy is loaded
        behavior = behavior_logps(recipe, prepared.items, tokenizer, directory.path)
    loaded = sharding.load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
    longest = max(prepared.items, key=lambda e: len(e.ids))
    hf_trainer.check_window(loaded, longest.uid, len(longest.ids))
    weighing = Weighing.of(recipe, loaded.tokenizer)
    trl_trainer.check_router(causal_of(loaded.model), recipe.objective.router_aux_loss, weighed=weighing is not None)
    collate = make_padding_collator(loaded.pad_id)
    if recipe.batch.packing:
        collate = make_packing_collator(loaded)
        collate = with_images(collate, loaded.images) if loaded.images else collate
        check_packing(loaded, collate, prepared.items)
    elif loaded.images is not None:
        collate = with_images(collate, loaded.images)
    losses = [validation_loss(loaded, unseen.items, collate, recipe)] if unseen else []
    if behavior is not None:
        collate = with_behavior(collate)
    job = Job.of(recipe, directory, loaded, len(prepared.items), len(longest.ids))
    order = load_balancing.balance_micro_batches if recipe.batch.packing else load_balancing.sort_by_length
    job.order = functools.partial(order, [len(example.ids) for example in prepared.items])
    trainer = make_trainer(job, prepared.items, collate, behavior)
    trainer.weighing = weighing
    if trainer.weighing is not None:
        verify_head(loaded, Sequences((longest.ids,), (1,)))
    with noisy_embeddings(loaded.model, recipe.objective.neftune):
        notes = [hf_trainer.rows_note(prepared, "row"), shared_rows_note(prepared.kept_rows, held_out or unseen)]
        if why := trl_trainer.why_no_router_loss(causal_of(loaded.model), weighed=trainer.weighing is not None):
            notes.append(trl_trainer.NO_ROUTER_LOSS + why)
        with rows_evaluation(recipe, directory, loaded, held_out, losses, terminal.note) as job.evaluation:
            return hf_trainer.train(trainer, job, COLUMNS, notes)


def validation_loss(loaded: LoadedModel, examples: Sequence[Example], collate: Collator, recipe: SftRecipe) -> Measure:
    """Return a function that computes the mean negative log-prob of held-out rows' trained tokens.

    Independent of how the objective weights tokens.
    """
    longest = max(examples, key=lambda example: len(example.ids))
    hf_trainer.check_window(loaded, longest.uid, len(longest.ids))
    rows = dataset(examples)
    micro = row_plan(recipe, len(examples)).micro
    batches = evaluation.batches_of([len(example.ids) for example in examples], micro)

    def measure(_: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        sums = evaluation.sum_over_rows(loaded, rows, batches, collate, evaluation.token_sums(loaded))
        tokens = sums["tokens"]
        return {"loss": sums["loss"] / tokens, "mean_token_accuracy": sums["right"] / tokens}, []

    return measure


def make_trainer(
    job: Job, examples: Sequence[Example], collate: Collator, behavior: Sequence[Sequence[float]] | None = None
) -> Sft:
    """Build the TRL trainer for these examples. behavior: log-prob of each token under objective.behavior_model."""
    rows = dataset(examples)
    options: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    assert isinstance(job.recipe, SftRecipe)
    if not trl_trainer.can_balance_router(causal_of(job.loaded.model)):
        options["router_aux_loss_coef"] = 0.0
    elif job.recipe.objective.router_aux_loss is not None:
        options["router_aux_loss_coef"] = job.recipe.objective.router_aux_loss
    return build_trainer(
        Sft,
        SFTConfig,
        job,
        options,
        train_dataset=rows if behavior is None else rows.add_column("behavior_logp", list(behavior)),
        data_collator=collate,
    )


def dataset(examples: Sequence[Example]) -> Dataset:
    """Return a dataset with columns input_ids, labels, and images if rows have any.

    labels equal the ids of tokens that are trained on and are -100 elsewhere.
    """
    labels = [[i if on else IGNORED for i, on in zip(e.ids, e.trained, strict=True)] for e in examples]
    images = image_column([e.images for e in examples])
    return Dataset.from_dict({"input_ids": [list(e.ids) for e in examples], "labels": labels, **images})


def make_padding_collator(pad_id: int) -> Collator:
    """Return a collator that pads the rows of a forward pass on the right to the longest."""
    return DataCollatorForLanguageModeling(pad_token_id=pad_id)


def make_packing_collator(loaded: LoadedModel) -> Collator:
    """Return a collator that lays the rows of a forward pass one after another in one line.

    An optimizer step has the same rows as without packing. Positions start at 0 in each row, and a row's first token is
    not a target. Attention stays within a row: by its borders if the architecture supports packed attention (the model
    is switched to it here), otherwise by the mask that transformers derives from the positions. Raises ModelError if
    ranks divide packed lines, which needs the borders.
    """
    with_borders = use_packed_attention(loaded.model)
    if not with_borders and is_split(causal_of(loaded.model)):
        raise cannot_split_error()

    def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        lengths = [len(row["input_ids"]) for row in rows]
        ids = to_device([i for row in rows for i in row["input_ids"]])
        labels = to_device([label for row in rows for label in (IGNORED, *row["labels"][1:])])
        positions = concatenate_ranges(lengths)
        line = {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
        return {**line, "packed": Packed.of(lengths, loaded.device)} if with_borders else line

    return collate


class Sft(RunLoop, SFTTrainer):
    """SFTTrainer in posttrain's loop; its metrics become means over the trained tokens of the whole step."""

    weighing: Weighing | None = None  # weights of trained tokens; None: all 1

    def denominator(self, batches: Sequence[dict[str, Tensor]]) -> float:
        if self.weighing is not None and self.weighing.by_weights:
            return sum(float(self.weighing.weights(batch).sum()) for batch in batches)
        return sum(count_trained_tokens(batch) for batch in batches)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        trained = count_trained_tokens(inputs)
        if self.weighing is not None:
            loss = self._weighted_loss(self.weighing, model, inputs) / num_items_in_batch
        else:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            for name in ("entropy", "mean_token_accuracy"):
                self.add(name, self._metrics["train"][name].pop() * trained)
        self.add("trained", trained)
        self.add("tokens", count_tokens(inputs))
        return loss

    def _weighted_loss(self, weighing: Weighing, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Compute -sum(weight * logp) over the trained tokens of a micro-batch."""
        model_inputs = {key: value for key, value in inputs.items() if key not in ("labels", "behavior_logp")}
        mask = trained_targets(inputs)
        with self.job.loaded.autocast():
            model_inputs = image_inputs(model, model_inputs)
            found = label_scores(model, model_inputs, mask, inputs["labels"][:, 1:][mask])
        logp = found["logp"]
        weights = weighing.weights(inputs, logp).detach()
        self.add("entropy", found["entropy"].sum())
        self.add("mean_token_accuracy", found["right"].sum())
        self.add("cross_entropy", -logp.sum())
        self.add("token_weight", weights.sum())
        return weighted_nll(logp, torch.ones_like(logp), weights, num_items=1)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        names = ("entropy", "mean_token_accuracy", "cross_entropy", "token_weight")
        return {name: sums[name] / max(sums["trained"], 1) for name in names if name in sums}


def count_trained_tokens(batch: Mapping[str, Tensor]) -> int:
    """Count the targets in a micro-batch. The first position of a row has no predecessor to predict it from."""
    return int((batch["labels"][..., 1:] != IGNORED).sum())


def count_tokens(batch: Mapping[str, Tensor]) -> int:
    """Count the tokens in a micro-batch, without padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def check_packing(loaded: LoadedModel, collate: Collator, examples: Sequence[Example]) -> None:
    """Raise ModelError unless a packed row gets the logits it gets alone, whatever precedes it in the line."""
    vocabulary = loaded.model.get_input_embeddings().num_embeddings
    before, row = (_row(e.ids[:PROBE]) for e in (examples[0], max(examples, key=lambda e: len(e.ids))))
    image_tokens: frozenset[int] = frozenset()
    if with_image := next((example for example in examples if example.images), None):
        assert loaded.images is not None
        before, image_tokens = dict(dataset([with_image])[0]), loaded.images.token_ids
        row = before
    elif len(before["input_ids"]) % WINDOW == 0:  # else chunks of the line would coincide with chunks of the row
        before = _row(before["input_ids"][:-1])
    following = {i: (i + 1) % vocabulary for i in before["input_ids"]}
    replaced = [i if i in image_tokens or following[i] in image_tokens else following[i] for i in before["input_ids"]]
    changed = {**before, "input_ids": replaced}
    with eval_mode(loaded.model), torch.no_grad(), short_windows(causal_of(loaded.model)):
        packed, other = (_last_logits(loaded, collate, rows) for rows in ([before, row], [changed, row]))
        plain = collate
        if loaded.images is not None and with_image:  # image tokens of a line may attend in one direction only
            plain = with_images(make_padding_collator(loaded.pad_id), loaded.images)
        alone = _last_logits(loaded, plain, [row])
    scale = float(alone.abs().max())
    leak, shift = float((packed - other).abs().max()) / scale, float((packed - alone).abs().max()) / scale
    half = loaded.half is not None or loaded.model.dtype != torch.float32
    if leak > 1e-4 or shift > (3e-2 if half else 1e-3):
        raise ModelError(
            f"packing is not exact for {loaded.source}: logits of a row change by {max(leak, shift):.1%} with what is"
            " packed before it",
            hint="set batch.packing to false, or model.attention to sdpa or flash_attention_2",
        )


def _row(ids: Sequence[int]) -> dict[str, Any]:
    return {"input_ids": list(ids), "labels": list(ids)}


def _last_logits(loaded: LoadedModel, collate: Collator, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the logits [T,V] of the last of the packed rows."""
    batch = collate(rows)
    inputs = send_to_device({name: value for name, value in batch.items() if name != "labels"}, loaded.device)
    with loaded.autocast():
        model_inputs = image_inputs(loaded.model, inputs)
        return loaded.model(**model_inputs, use_cache=False).logits[0, -len(rows[-1]["input_ids"]) :].float()


def label_scores(model: Any, inputs: Mapping[str, Any], mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute `logp`, `entropy` and `right` (no token is likelier) [K] of K labels.

    Label k is predicted at the k-th position where `mask` [B,T-1] of the rows [B,T] is True. inputs: of the model,
    without labels.
    """
    causal = causal_of(model)

    def compute_scores() -> dict[str, Tensor]:
        states = backbone(causal)(**inputs, use_cache=False).last_hidden_state
        return token_scores(Head(causal), states[:, :-1][mask], labels, top_k=1)

    found = as_forward(causal, compute_scores)
    return {"logp": found["logp"], "entropy": found["entropy"], "right": found["topk_chosen"][:, 0]}
