"""Reward models: heads on a language model that score answers, trained on preference pairs or labels.

The training loop and its surroundings are those of sft and dpo (`hf_trainer`). After the last step the model is
evaluated on held-out rows and saved with the report's means and standard deviations besides its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer
from trl import RewardConfig

from posttrain.evaluate.reward_report import label_report, pair_report, show, tables
from posttrain.loss.reward_model import (
    best_response,
    bradley_terry,
    center_by_prompt,
    gaussian_nll,
    mixture_round,
    reseed_assignment,
    soft_label,
)
from posttrain.models import load as models
from posttrain.models import scorer
from posttrain.models.load import LoadedModel
from posttrain.models.scorer import Card
from posttrain.recipe.preference_sections import HEAD_A_LABEL
from posttrain.recipe.stages import RewardModelRecipe
from posttrain.run.directory import RunDirectory
from posttrain.train import distributed, hf_trainer, load_balancing, machine_checks, reward_rows
from posttrain.train.hf_trainer import Job, RunLoop
from posttrain.train.image_batches import IMAGES, Collate, image_column, with_images
from posttrain.train.library_logging import quiet
from posttrain.train.reward_rows import Item, Items
from posttrain.train.trl_trainer import build_trainer

COLUMNS = ("loss", "accuracy", "margin", "grad_norm", "lr", "time/tokens_per_s")


def run(recipe: RewardModelRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train from the newest complete checkpoint (or the start), evaluate, save, and return the summary.

    `report` in the summary is about the held-out rows, or the training rows if none are held out (`report_on`).
    """
    quiet()
    machine_checks.check(recipe)
    settings = recipe.objective
    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    items = reward_rows.read(recipe, tokenizer, models.load_image_reader(recipe.model, recipe.base_dir, tokenizer))
    outputs = settings.count * (2 if settings.use == "gaussian" else 1)
    loaded = scorer.load(recipe.model, recipe.base_dir, outputs=outputs, seed=recipe.run.seed, training=True)
    longest = max([*items.trained, *items.held], key=lambda item: item.longest)
    hf_trainer.check_window(loaded, longest.uid, longest.longest)
    job = Job.of(recipe, directory, loaded, len(items.trained), longest.longest)
    job.order = functools.partial(load_balancing.sort_by_length, [item.longest for item in items.trained])
    trainer = make_trainer(job, items)
    notes = [hf_trainer.rows_note(items.prepared, "row"), f"held out for the report: {len(items.held)}"]
    if settings.pairs:
        notes.append(reward_rows.lengths_note(items.trained))
    if settings.best_response is not None:
        notes.append(reward_rows.best_response_note(items.trained))

    def evaluate_and_save(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
        measured = report(recipe, loaded, items, trainer.head_assignment())
        return {
            **scorer.save(loaded, folder, card(recipe, items, measured, trainer.head_assignment())),
            "measured": measured,
        }

    summary = hf_trainer.train(trainer, job, COLUMNS, notes, evaluate_and_save)
    measured = summary["save"].pop("measured")
    found = measured["report"]
    if distributed.is_main():
        show(found)
    return {
        **summary,
        "heads": settings.count,
        **measured,
        "tables": tables(found),
        "findings": [
            *found["findings"],
            *([] if items.held else ["evaluated on the training rows"]),
        ],
    }


def make_trainer(job: Job, items: Items) -> RewardTrainer:
    """Build the trainer for these items."""
    columns: dict[str, list[Any]] = {
        "rows": [[list(row) for row in item.rows] for item in items.trained],
        "margin": [item.margin for item in items.trained],
        "labels": [list(item.labels) for item in items.trained],
        "number": list(range(len(items.trained))),
        **image_column([item.images for item in items.trained]),
    }
    collate: Collate = functools.partial(collate_items, pad=job.loaded.pad_id)
    if job.loaded.images is not None:
        collate = with_images(collate, job.loaded.images, copies=len(items.trained[0].rows))
    trainer = build_trainer(
        RewardTrainer,
        RewardConfig,
        job,
        {"center_rewards_coefficient": None},
        train_dataset=Dataset.from_dict(columns),
        data_collator=collate,
    )
    trainer.begin(items)
    return trainer


def collate_items(items: Sequence[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    """Pad the first rows of all items (chosen ones), then second rows if there are any; add the items' numbers."""
    sides = range(len(items[0]["rows"]))
    batch = scorer.pad_rows([item["rows"][side] for side in sides for item in items], pad)
    return {
        **batch,
        "margin": torch.tensor([item["margin"] for item in items]),
        "labels": torch.tensor([item["labels"] for item in items], dtype=torch.float32).reshape(len(items), -1),
        "number": torch.tensor([item["number"] for item in items]),
    }


class RewardTrainer(RunLoop, Trainer):
    """Trainer in posttrain's loop.

    Every row counts once for each head that sees it; the loss is the mean over these counts.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the counts of the whole step
    weights: Tensor  # [rows, heads] weight of each row in the loss of each head
    items: Items

    def begin(self, items: Items) -> None:
        """Assign rows to heads, from the seed alone, and number users and prompts."""
        self.items, recipe = items, self.recipe
        settings = recipe.objective
        seen = [
            reward_rows.heads_of_row(recipe.run.seed, item.uid, settings.count, settings.share)
            for item in items.trained
        ]
        self.weights = torch.tensor(seen)
        self.users = torch.tensor([items.users[item.user] for item in items.trained])
        numbers = {key: n for n, key in enumerate(dict.fromkeys(item.prompt_key for item in items.trained))}
        self.prompts = torch.tensor([numbers[item.prompt_key] for item in items.trained])

    @property
    def recipe(self) -> RewardModelRecipe:
        recipe = self.job.recipe
        assert isinstance(recipe, RewardModelRecipe)
        return recipe

    def head_assignment(self) -> list[list[float]] | None:
        """Return the weights [users][heads] of a mixture's newest round, also after a resume; None without a
        mixture.
        """
        return self.job.state.memory.get("heads_of_users")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Like RunLoop; first assigns users to heads at the start of a round of a mixture."""
        steps = max(1, -(-self.job.plan.steps // self.recipe.objective.rounds))  # of a round
        if self.recipe.objective.use == "mixture" and self.job.state.step % steps == 0:
            self.job.state.memory["heads_of_users"] = distributed.run_on_rank0(self._assign)
        if self.recipe.objective.best_response is not None and self.job.state.step == 0:
            self.job.state.memory["at_start"] = distributed.run_on_rank0(self._score_start)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _assign(self) -> list[list[float]]:
        """Run the E-step over all training pairs; return weights [users][heads]."""
        settings = self.recipe.objective
        scores = score_items(self.job.loaded, self.items.trained)
        margins = scores[0::2] - scores[1::2]
        found = mixture_round(margins, self.users, len(self.items.users), soft=settings.soft)
        if settings.soft:
            return list(found.responsibilities.tolist())
        counts = torch.bincount(self.users, minlength=len(self.items.users))
        return list(nn.functional.one_hot(reseed_assignment(found, counts), settings.count).float().tolist())

    def _score_start(self) -> dict[str, list[list[float]]]:
        """Score all training pairs with the start model, the one that the policy has optimized.

        Returns `scores`, the sums of both sides, and `excess`, their losses relative to the prompt's other pairs; each
        [rows][heads].
        """
        items = self.items.trained
        scores = score_items(self.job.loaded, items)
        margin = torch.tensor([item.margin for item in items]).to(scores)[:, None]
        losses = bradley_terry(scores[0::2], scores[1::2], margin).losses
        sums = scores[0::2] + scores[1::2]
        return {"scores": sums.tolist(), "excess": center_by_prompt(losses, self.prompts.to(losses.device)).tolist()}

    def row_weights(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the weights [rows of the batch, heads]; for labels, 0 if a row lacks one."""
        numbers = batch["number"].cpu()
        weights = self.weights[numbers]
        assigned = self.head_assignment()
        if assigned is not None:
            weights = weights * torch.tensor(assigned)[self.users[numbers]]
        if not self.recipe.objective.pairs:
            weights = weights * (~batch["labels"].cpu().isnan())
        return weights

    def denominator(self, batches: Sequence[dict[str, Tensor]]) -> float:
        return float(sum(self.row_weights(batch).sum() for batch in batches))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute this micro-batch's part of the mean loss of the step."""
        del return_outputs
        image_kwargs = inputs[IMAGES].inputs(model, inputs["input_ids"]) if IMAGES in inputs else {}
        with self.job.loaded.autocast():
            found = scorer.compute_outputs(model, inputs, image_kwargs)
        weights = self.row_weights(inputs).to(found)
        losses = self._pairs(found, inputs, weights) if self.recipe.objective.pairs else self._labels(found, inputs)
        self.add("rows", len(inputs["number"]))
        self.add("tokens", inputs["attention_mask"].sum())
        self.add("trained", inputs["attention_mask"].sum())
        return (weights * losses).sum() / num_items_in_batch

    def _pairs(self, scores: Tensor, inputs: dict[str, Tensor], weights: Tensor) -> Tensor:
        """Compute the losses [P,heads] of pairs."""
        chosen, rejected = scores.chunk(2)
        result = bradley_terry(
            chosen, rejected, inputs["margin"].to(scores)[:, None], center_coef=self.recipe.objective.center_coef
        )
        self.add("weights", weights.sum())
        self.add("accuracy", (weights * result.accuracy).sum())
        self.add("margin", (weights * (chosen - rejected)).sum())
        self.add("score", ((chosen + rejected) / 2).mean(1).sum())
        temperature = self.recipe.objective.best_response
        if temperature is None:
            return result.losses
        start, numbers = self.job.state.memory["at_start"], inputs["number"].tolist()
        sums, excess = (torch.tensor([start[key][n] for n in numbers]).to(scores) for key in ("scores", "excess"))
        response = best_response(excess, chosen + rejected, sums, temperature=temperature)
        self.add("response", (weights * response.log_odds.abs()).sum())
        return result.losses + response.losses

    def _labels(self, found: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Compute the losses [N,heads] of labeled answers; arbitrary if a label is missing, since its weight is 0."""
        labels = inputs["labels"].to(found).nan_to_num()
        self.add("score", found[:, : self.recipe.objective.count].mean(1).sum())
        if self.recipe.objective.use == "gaussian":
            means, log_stds = found.chunk(2, dim=1)
            return gaussian_nll(means, log_stds, labels)
        if self.recipe.objective.use == "soft_label":
            return soft_label(found, labels)
        return (found - labels).square()

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        means: dict[str, float] = {}
        for name in ("accuracy", "margin", "response"):
            if name in sums:
                means[name] = sums[name] / max(sums["weights"], 1e-9)
        means["score"] = sums["score"] / sums["rows"]
        return means


def score_items(loaded: LoadedModel, items: Sequence[Item]) -> Tensor:
    """Return the outputs [rows, outputs] of the heads for all rows of the items."""
    images = [item.images for item in items for _ in item.rows]
    return scorer.score_rows(loaded, [row for item in items for row in item.rows], images)


def report(
    recipe: RewardModelRecipe, loaded: LoadedModel, items: Items, assigned: list[list[float]] | None
) -> dict[str, Any]:
    """Evaluate the model; return `report`, `report_on`, and `center` and `scale` of each head over the same answers."""
    on, rows = ("held-out rows", items.held) if items.held else ("training rows", items.trained)
    scores = score_items(loaded, rows).double().numpy()
    if recipe.objective.use == "soft_label":
        scores = 1 / (1 + np.exp(-scores.clip(-500, 500)))
    heads = scores[:, : recipe.objective.count]
    found = (_report_pairs if recipe.objective.pairs else _report_labels)(recipe, rows, heads, items, assigned)
    spread = heads.std(0)
    return {
        "report": found,
        "report_on": on,
        "center": heads.mean(0).tolist(),
        "scale": np.where(spread > 0, spread, 1.0).tolist(),
    }


def _report_pairs(
    recipe: RewardModelRecipe, rows: list[Item], scores: np.ndarray, items: Items, assigned: list[list[float]] | None
) -> dict[str, Any]:
    """Report on pairs by the mean over heads; for a mixture, by the head of the pair's user."""
    heads = scores.mean(1)
    if assigned is not None:
        best = np.argmax(np.array(assigned), axis=1)
        head_of_row = np.repeat([best[items.users[item.user]] for item in rows], 2)
        heads = scores[np.arange(len(scores)), head_of_row]
    lengths = [[item.lengths[side] for item in rows] for side in (0, 1)]
    report = pair_report(heads[0::2].tolist(), heads[1::2].tolist(), *lengths, seed=recipe.run.seed)
    if scores.shape[1] > 1:
        report["accuracy_by_head"] = (scores[0::2] > scores[1::2]).mean(0).tolist()
    if assigned is not None:
        report["users_by_head"] = np.bincount(best, minlength=scores.shape[1]).tolist()
    return report


def _report_labels(
    recipe: RewardModelRecipe, rows: list[Item], scores: np.ndarray, items: Items, assigned: Any
) -> dict[str, Any]:
    del items, assigned
    settings = recipe.objective
    labels = np.array([item.labels for item in rows])
    if settings.use == "gaussian":  # one label, the heads' mean
        scores = scores.mean(1, keepdims=True)
    lengths = [item.lengths[0] for item in rows]
    return label_report(scores, labels, settings.labels, lengths, seed=recipe.run.seed)


def card(recipe: RewardModelRecipe, items: Items, measured: dict[str, Any], assigned: list[list[float]] | None) -> Card:
    """Return the card that is saved with the model: its heads, data format, and their means and deviations."""
    settings = recipe.objective
    names = settings.labels if settings.use in HEAD_A_LABEL else [f"head_{n}" for n in range(settings.count)]
    users: dict[str, int] = {}
    if assigned is not None and settings.user:
        users = {user: int(np.argmax(assigned[n])) for user, n in items.users.items()}
    return Card(
        use=settings.use,
        heads=tuple(names) if len(names) > 1 or settings.labels else ("reward",),
        data={key: getattr(recipe.data, key) for key in ("chat", "system", "prompt_template")}
        | {"image": recipe.data.image.model_dump(include={"min_pixels", "max_pixels"})},
        center=tuple(measured["center"]),
        scale=tuple(measured["scale"]),
        users=users,
    )
