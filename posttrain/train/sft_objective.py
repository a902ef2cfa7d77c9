"""SFT's objectives on the trainer's micro-batches: weights of trained tokens, and log-probs of the data's author.

Only trained tokens are looked at, row by row, so packed and padded rows get the same weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain import registry
from posttrain.data.render import Example
from posttrain.errors import ModelError
from posttrain.loss.token_weights import TokenRows, neftune
from posttrain.models import load as models
from posttrain.models.load import LoadedModel
from posttrain.recipe.stages import SftRecipe

IGNORED = -100  # the label of a token that is not trained on
BEHAVIOR = "behavior.safetensors"

Batch = Mapping[str, Any]


@dataclass
class Weighing:
    """A recipe's objective, ready for micro-batches."""

    function: Callable[..., Tensor]
    params: dict[str, Any]
    needs: frozenset[str]
    by_weights: bool
    tokenizer: Any
    _texts: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: SftRecipe, tokenizer: Any) -> Weighing | None:
        """None for plain cross-entropy, which the trainer computes itself."""
        section = recipe.objective
        if section.use == "ce":
            return None
        component = registry.resolve("token_weight", section.use, recipe.base_dir)
        by_weights = section.divisor == "weights"
        return cls(component.function, section.params, frozenset(component.needs), by_weights, tokenizer)

    def weights(self, batch: Batch, logp: Tensor | None = None) -> Tensor:
        """Weights [K] of the K trained tokens of a micro-batch, in the order of `trained`; logp [K]: theirs."""
        kept = trained(batch)
        targets = batch["labels"][:, 1:][kept]
        logp = torch.zeros(len(targets), device=targets.device) if logp is None else logp.detach()
        rows = row_numbers(batch, kept)
        behavior = batch.get("behavior_logp")
        texts = self._texts_of(targets, rows) if "texts" in self.needs else None
        mask, (padded, written) = stacked(rows, logp, None if behavior is None else behavior[:, 1:][kept])
        assert padded is not None
        return self.function(TokenRows(padded, mask, written, texts), **self.params)[mask]

    def _texts_of(self, targets: Tensor, rows: Tensor) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in range(int(rows.max()) + 1 if len(rows) else 0)]
        for token, row in zip(targets.tolist(), rows.tolist(), strict=True):
            if token not in self._texts:
                self._texts[token] = self.tokenizer.decode([token])
            found[row].append(self._texts[token])
        return found


def example_weights(
    recipe: SftRecipe, tokenizer: Any, *, with_model: bool = False
) -> Callable[[Example], list[float]] | None:
    """What each token of an example counts, 0 where nothing is trained on; None where all count alike.

    Weights that follow the model are those of its start; they are None too unless it may be loaded (`with_model`).
    """
    weighing = Weighing.of(recipe, tokenizer)
    follows = weighing is not None and "logp" in weighing.needs
    if weighing is None or (follows and not with_model):
        return None
    start = models.load(recipe.model, recipe.base_dir, seed=recipe.run.seed) if follows else None
    author = None if recipe.objective.behavior_model is None or start is None else _author(recipe, tokenizer)

    def weigh(example: Example) -> list[float]:
        labels = [i if on else IGNORED for i, on in zip(example.ids, example.trained, strict=True)]
        batch: dict[str, Any] = {"labels": torch.tensor([labels])}
        if author is not None:
            batch["behavior_logp"] = _scored_one(author, example)[None]
        kept = trained(batch)[0]
        logp = None if start is None else _scored_one(start, example)[1:][kept]
        found = torch.zeros(len(labels))
        found[1:][kept] = weighing.weights(batch, logp)
        return found.tolist()

    return weigh


def trained(batch: Batch) -> Tensor:
    """Which targets [B, T - 1] are trained on. The first position of a row has no predecessor to predict it from."""
    return batch["labels"][:, 1:] != IGNORED


def row_numbers(batch: Batch, kept: Tensor) -> Tensor:
    """The row [K] that each trained token belongs to: a line of the batch, or a packed part of its one line."""
    if "position_ids" in batch:
        return ((batch["position_ids"] == 0).cumsum(1) - 1)[:, 1:][kept]
    return torch.arange(kept.shape[0], device=kept.device)[:, None].expand_as(kept)[kept]


def stacked(rows: Tensor, *values: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """Values [K] as [N, L], the tokens of each row one behind the other, with the mask of what is there."""
    counts = torch.bincount(rows)
    longest = int(counts.max()) if len(counts) else 0
    mask = torch.arange(longest, device=rows.device)[None] < counts[:, None]
    found: list[Tensor | None] = []
    for value in values:
        found.append(None if value is None else value.new_zeros(mask.shape).masked_scatter(mask, value))
    return mask, found


def with_behavior(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A collator that also carries the column `behavior_logp`, in the shape of the labels."""

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
    """Log-prob of each token under objective.behavior_model, NaN where nothing is trained on.

    Computed once and kept in `folder`, so that a resumed run reads it. Raises ModelError if that model has another
    vocabulary, or the file belongs to other rows.
    """
    lengths = [len(example.ids) for example in examples]
    path = folder / BEHAVIOR
    if not path.is_file():
        values = _scored(recipe, examples, tokenizer)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({"logp": torch.cat(values), "lengths": torch.tensor(lengths)}, partial)
        partial.replace(path)
    stored = load_file(path)
    if stored["lengths"].tolist() != lengths:
        raise ModelError("the stored log-probs belong to other rows", where=str(path), hint="start a new run")
    return [part.tolist() for part in stored["logp"].split(lengths)]


def _scored(recipe: SftRecipe, examples: Sequence[Example], tokenizer: Any) -> list[Tensor]:
    author = _author(recipe, tokenizer)
    return [_scored_one(author, example) for example in examples]


def _author(recipe: SftRecipe, tokenizer: Any) -> LoadedModel:
    """The model that wrote the data. Raises ModelError if it has another vocabulary."""
    path, key = recipe.objective.behavior_model, "objective.behavior_model"
    assert path is not None
    return models.second(recipe.model, path, recipe.base_dir, tokenizer, key=key, seed=recipe.run.seed)


@torch.no_grad()
def _scored_one(author: LoadedModel, example: Example) -> Tensor:
    ids = torch.tensor([example.ids], device=author.device)
    with author.autocast():
        logits = author.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    logp = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
    on = torch.tensor(example.trained)
    return torch.where(on, torch.cat([torch.full((1,), torch.nan), logp]), torch.full((len(on),), torch.nan))


@contextlib.contextmanager
def noisy_embeddings(model: nn.Module, alpha: float) -> Iterator[None]:
    """NEFTune's noise on the input embeddings while the model is in training mode; nothing with alpha 0."""
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
