"""Log-probs of preference pairs under models that a recipe names (`anchors`), other than the trained policy.

Each model is loaded, computes the summed log-probs of every pair and is freed before the policy is loaded, so no second
model is ever in memory. A resumed run reads the numbers from its directory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.data.render import Pair
from posttrain.models import load as models
from posttrain.models.load import LoadedModel
from posttrain.recipe.stages import DpoRecipe
from posttrain.run.directory import RunDirectory
from posttrain.train import pair_columns, stored_logps

SIDES = ("chosen", "rejected")
Logps = Mapping[str, Tensor]  # side -> [number of pairs], float32
Measure = Callable[[LoadedModel], Logps]


def columns(
    recipe: DpoRecipe,
    directory: RunDirectory,
    pairs: Sequence[Pair],
    given: Mapping[str, Sequence[Any]],
    tokenizer: Any,
    measure: Measure,
) -> pair_columns.Columns:
    """Return columns for every policy of the recipe's `anchors`: field of a PairBatch -> its value for each pair.

    given: columns of the data. Raises RecipeError if they contain what `anchors` names too, ModelError for a model with
    another vocabulary.
    """
    named = recipe.anchors
    columns: pair_columns.Columns = {}
    for key, need in (("reference", "ref_logp"), ("previous", "prev_logp")):
        path = getattr(named, key)
        if path is None:
            continue
        logps = _of(path, f"anchors.{key}", recipe, directory, pairs, tokenizer, measure)
        columns |= columns_of_logps(need, logps)
    past = [
        _of(path, f"anchors.history.{number}", recipe, directory, pairs, tokenizer, measure)
        for number, path in enumerate(named.history)
    ]
    for side, field in zip(SIDES, pair_columns.ANCHORS["history"], strict=True):
        if past:
            columns[field] = torch.stack([logps[side] for logps in past], 1).tolist()
    pair_columns.refuse_twice(given, named)
    return columns


def columns_of_logps(need: str, logps: Logps) -> pair_columns.Columns:
    """Return the log-probs of both sides as the columns that the need has: `ref_chosen_logp`, ..."""
    return {field: logps[side].tolist() for side, field in zip(SIDES, pair_columns.ANCHORS[need], strict=True)}


def _of(
    path: str,
    key: str,
    recipe: DpoRecipe,
    directory: RunDirectory,
    pairs: Sequence[Pair],
    tokenizer: Any,
    measure: Measure,
) -> Logps:
    """Return log-probs under the model at `path`, read from the run directory if they are stored there."""
    cache = directory.path / f"{key}.safetensors"

    def compute() -> Logps:
        seed = recipe.run.seed
        return measure(models.load_companion(recipe.model, path, recipe.base_dir, tokenizer, key=key, seed=seed))

    logps = stored_logps.read_or_compute(cache, tokens_of(pairs), compute)
    gc.collect()  # frees the model
    return logps


def tokens_of(pairs: Sequence[Pair]) -> list[list[Sequence[int]]]:
    """Return the token ids of pairs, by which `stored_logps` recognizes for which rows log-probs were stored."""
    return [[pair.prompt_ids, pair.chosen_ids, pair.rejected_ids] for pair in pairs]
