"""SFT objectives on the trainer's micro-batches: token weights, and log-probs under the model that wrote the data.

Only trained tokens are read, row by row, so packed and padded rows get the same weights.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain import registry
from posttrain.data.render import Example
from posttrain.loss.token_weights import TokenRows, neftune
from posttrain.models import load as models
from posttrain.models.load import LoadedModel
from posttrain.recipe.stages import SftRecipe
from posttrain.train import data_parallel, stored_logps
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import IGNORED, Sequences
from posttrain.train.logprobs import completion_logprobs, micro_batches
from posttrain.train.pass_checks import verify_head

BEHAVIOR = "behavior.safetensors"
MICRO_TOKENS = 16384  # tokens of a forward pass of the behavior model

Batch = Mapping[str, Any]


@dataclass
class Weighing:
    """Token weights of a recipe's objective, applied to micro-batches."""

    function: Callable[..., Tensor]
    params: dict[str, Any]
    needs: frozenset[str]
    by_weights: bool
    tokenizer: Any
    _texts: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: SftRecipe, tokenizer: Any) -> Weighing | None:
        """Return the token weights of the recipe's objective; None for cross-entropy, which the trainer computes
        itself.
        """
        section = recipe.objective
        if section.use == "ce":
            return None
        component = registry.resolve("token_weight", section.use, recipe.base_dir)
        by_weights = section.divisor == "weights"
        return cls(component.function, section.params, frozenset(component.needs), by_weights, tokenizer)

    def weights(self, batch: Batch, logp: Tensor | None = None) -> Tensor:
        """Compute the weights [K] of a micro-batch's trained tokens, in the order of `trained_targets`.

        logp [K]: of these tokens, None = 0.
        """
        is_target = trained_targets(batch)
        targets = batch["labels"][:, 1:][is_target]
        logp = torch.zeros(len(targets), device=targets.device) if logp is None else logp.detach()
        rows = row_numbers(batch, is_target)
        behavior = batch.get("behavior_logp")
        texts = self._texts_of(targets, rows) if "texts" in self.needs else None
        mask, (padded, behavior) = stack_rows(rows, logp, None if behavior is None else behavior[:, 1:][is_target])
        assert padded is not None
        return self.function(TokenRows(padded, mask, behavior, texts), **self.params)[mask]

    def _texts_of(self, targets: Tensor, rows: Tensor) -> list[list[str]]:
        texts: list[list[str]] = [[] for _ in range(int(rows.max()) + 1 if len(rows) else 0)]
        for token, row in zip(targets.tolist(), rows.tolist(), strict=True):
            if token not in self._texts:
                self._texts[token] = self.tokenizer.decode([token])
            texts[row].append(self._texts[token])
        return texts


def example_weights(
    recipe: SftRecipe, tokenizer: Any, *, with_model: bool = False
) -> Callable[[Example], list[float]] | None:
    """Return a function that computes the weight of each token of an example (0 if not trained on); None if all are 1.

    Weights that depend on the model are computed with the start model; None unless it may be loaded (`with_model`).
    """
    weighing = Weighing.of(recipe, tokenizer)
    needs_model = weighing is not None and "logp" in weighing.needs
    if weighing is None or (needs_model and not with_model):
        return None
    start = models.load(recipe.model, recipe.base_dir, seed=recipe.run.seed) if needs_model else None
    behavior = None if recipe.objective.behavior_model is None or start is None else _behavior_model(recipe, tokenizer)

    def weigh(example: Example) -> list[float]:
        labels = [i if on else IGNORED for i, on in zip(example.ids, example.trained, strict=True)]
        batch: dict[str, Any] = {"labels": torch.tensor([labels])}
        if behavior is not None:
            batch["behavior_logp"] = score_examples(behavior, [example])[0][None]
        is_target = trained_targets(batch)[0]
        logp = None if start is None else score_examples(start, [example])[0][1:][is_target]
        found = torch.zeros(len(labels))
        found[1:][is_target] = weighing.weights(batch, logp)
        return found.tolist()

    return weigh


def trained_targets(batch: Batch) -> Tensor:
    """Return the mask [B, T - 1] of trained targets. A row's first position has no predecessor to predict it from."""
    return batch["labels"][:, 1:] != IGNORED


def row_numbers(batch: Batch, is_target: Tensor) -> Tensor:
    """Return the row [K] that each trained token belongs to: a row of the batch, or a packed row of its one line."""
    if "position_ids" in batch:
        return ((batch["position_ids"] == 0).cumsum(1) - 1)[:, 1:][is_target]
    return torch.arange(is_target.shape[0], device=is_target.device)[:, None].expand_as(is_target)[is_target]


def stack_rows(rows: Tensor, *values: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """Stack values [K] into [N, L], the tokens of each row one after the other; return (mask of filled cells,
    values).
    """
    counts = torch.bincount(rows)
    longest = int(counts.max()) if len(counts) else 0
    mask = torch.arange(longest, device=rows.device)[None] < counts[:, None]
    stacked: list[Tensor | None] = []
    for value in values:
        stacked.append(None if value is None else value.new_zeros(mask.shape).masked_scatter(mask, value))
    return mask, stacked


def with_behavior(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a collator that also collates the column `behavior_logp`, in the shape of the labels."""

    def both(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collate([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
        values = [torch.tensor(row["behavior_logp"], dtype=torch.float32) for row in rows]
        if "position_ids" in batch:
            return {**batch, "behavior_logp": torch.cat(values)[None]}
        line = torch.full(batch["labels"].shape, torch.nan)
        for i, value in enumerate(values):
            line[i, : len(value)] = value
        return {**batch, "behavior_logp": line}

    return both


def behavior_logps(recipe: SftRecipe, examples: Sequence[Example], tokenizer: Any, folder: Path) -> list[list[float]]:
    """Compute the log-prob of each token under objective.behavior_model, NaN where nothing is trained on.

    Computed once, by all ranks together, and stored in `folder`, so that a resumed run reads it. Raises ModelError if
    that model has another vocabulary.
    """
    path, rows = folder / BEHAVIOR, [example.ids for example in examples]

    def compute() -> dict[str, Tensor]:
        return {"logp": torch.cat(score_examples(_behavior_model(recipe, tokenizer), examples))}

    stored = stored_logps.read_or_compute(path, rows, compute)
    gc.collect()  # frees that model
    return [part.tolist() for part in stored["logp"].split([len(row) for row in rows])]


def _behavior_model(recipe: SftRecipe, tokenizer: Any) -> LoadedModel:
    """Load the model that wrote the data. Raises ModelError if it has another vocabulary."""
    path, key = recipe.objective.behavior_model, "objective.behavior_model"
    assert path is not None
    return models.load_companion(recipe.model, path, recipe.base_dir, tokenizer, key=key, seed=recipe.run.seed)


@torch.no_grad()
def score_examples(loaded: LoadedModel, examples: Sequence[Example]) -> list[Tensor]:
    """Compute the log-probs [T] of each row's tokens under a model, NaN where nothing is trained on.

    Ranks divide the rows.
    """
    packed = loaded.device.type == "cuda" and use_packed_attention(loaded.model)
    sequences = Sequences(tuple(example.ids for example in examples), (1,) * len(examples))
    verify_head(loaded, sequences)
    lengths = sequences.lengths
    out = [torch.zeros(length) for length in lengths]
    own_rows = data_parallel.my_rows(lengths)
    for micro in micro_batches([lengths[n] for n in own_rows], MICRO_TOKENS, packed=packed):
        rows = [own_rows[n] for n in micro]
        width = max(lengths[row] for row in rows) - 1  # the first token has no predecessor
        with loaded.autocast():
            found = completion_logprobs(loaded.model, sequences.select(rows), width, packed=packed)[0].cpu()
        for row, values in zip(rows, found, strict=True):
            out[row][1:] = values[: lengths[row] - 1]
    whole = data_parallel.sum_of_passes(torch.cat(out)).split(lengths)
    masks = [torch.tensor([False, *example.trained[1:]]) for example in examples]
    return [torch.where(mask, values, torch.nan) for mask, values in zip(masks, whole, strict=True)]


@contextlib.contextmanager
def noisy_embeddings(model: nn.Module, alpha: float) -> Iterator[None]:
    """Context manager that adds NEFTune's noise to the input embeddings in training mode; no-op for alpha 0."""
    if alpha == 0:
        yield
        return

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        del args
        if not module.training:
            return None
        noise = torch.empty_like(output).uniform_(-1, 1)
        return neftune(output, output.new_ones(output.shape[:2]), noise, alpha=alpha)

    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    handle = embeddings.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
