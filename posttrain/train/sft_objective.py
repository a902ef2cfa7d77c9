"""SFT's objectives on the trainer's micro-batches: weights of trained tokens, and log-probs of the data's author.

Only trained tokens are looked at, row by row, so packed and padded rows get the same weights.
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
from posttrain.train import distributed, stored_logps
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs, micro_batches
from posttrain.train.pass_checks import verify_head

IGNORED = -100  # the label of a token that is not trained on
BEHAVIOR = "behavior.safetensors"
MICRO_TOKENS = 16384  # of a forward pass of the data's author

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
        """Weights [K] of the K trained tokens of a micro-batch, in the order of `trained_targets`; logp [K]: theirs."""
        kept = trained_targets(batch)
        targets = batch["labels"][:, 1:][kept]
        logp = torch.zeros(len(targets), device=targets.device) if logp is None else logp.detach()
        rows = row_numbers(batch, kept)
        behavior = batch.get("behavior_logp")
        texts = self._texts_of(targets, rows) if "texts" in self.needs else None
        mask, (padded, written) = stack_rows(rows, logp, None if behavior is None else behavior[:, 1:][kept])
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
            batch["behavior_logp"] = score_examples(author, [example])[0][None]
        kept = trained_targets(batch)[0]
        logp = None if start is None else score_examples(start, [example])[0][1:][kept]
        found = torch.zeros(len(labels))
        found[1:][kept] = weighing.weights(batch, logp)
        return found.tolist()

    return weigh


def trained_targets(batch: Batch) -> Tensor:
    """Which targets [B, T - 1] are trained on. The first position of a row has no predecessor to predict it from."""
    return batch["labels"][:, 1:] != IGNORED


def row_numbers(batch: Batch, kept: Tensor) -> Tensor:
    """The row [K] that each trained token belongs to: a line of the batch, or a packed part of its one line."""
    if "position_ids" in batch:
        return ((batch["position_ids"] == 0).cumsum(1) - 1)[:, 1:][kept]
    return torch.arange(kept.shape[0], device=kept.device)[:, None].expand_as(kept)[kept]


def stack_rows(rows: Tensor, *values: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """Values [K] as [N, L], the tokens of each row one after the other, with the mask of what is there."""
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

    Computed once, by all ranks together, and kept in `folder`, so that a resumed run reads it. Raises ModelError if
    that model has another vocabulary.
    """
    path, rows = folder / BEHAVIOR, [example.ids for example in examples]
    stored = distributed.run_on_rank0(stored_logps.read, path, rows)
    if stored is None:
        author = _author(recipe, tokenizer)
        stored = {"logp": torch.cat(score_examples(author, examples))}
        distributed.run_on_rank0(stored_logps.write, path, rows, stored)
        del author
        gc.collect()
    return [part.tolist() for part in stored["logp"].split([len(row) for row in rows])]


def _author(recipe: SftRecipe, tokenizer: Any) -> LoadedModel:
    """The model that wrote the data. Raises ModelError if it has another vocabulary."""
    path, key = recipe.objective.behavior_model, "objective.behavior_model"
    assert path is not None
    return models.second(recipe.model, path, recipe.base_dir, tokenizer, key=key, seed=recipe.run.seed)


@torch.no_grad()
def score_examples(author: LoadedModel, examples: Sequence[Example]) -> list[Tensor]:
    """Log-probs of each row's tokens [T] under a model, NaN where nothing is trained on. Ranks divide the rows."""
    packed = author.device.type == "cuda" and use_packed_attention(author.model)
    sequences = Sequences(tuple(example.ids for example in examples), (1,) * len(examples))
    verify_head(author, sequences)
    lengths = sequences.lengths
    out = [torch.zeros(length) for length in lengths]
    mine = distributed.my_rows(lengths)
    for micro in micro_batches([lengths[n] for n in mine], MICRO_TOKENS, packed=packed):
        rows = [mine[n] for n in micro]
        width = max(lengths[row] for row in rows) - 1  # the first token has none before it
        with author.autocast():
            found = completion_logprobs(author.model, sequences.select(rows), width, packed=packed)[0].cpu()
        for row, values in zip(rows, found, strict=True):
            out[row][1:] = values[: lengths[row] - 1]
    whole = distributed.sum_of_passes(torch.cat(out)).split(lengths)
    on = [torch.tensor([False, *example.trained[1:]]) for example in examples]
    return [torch.where(kept, values, torch.nan) for kept, values in zip(on, whole, strict=True)]


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
