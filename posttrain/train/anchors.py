"""Log-probs of other policies than the one that is trained: of models that a recipe names, and the store of them.

Each model is loaded, asked for the summed log-probs of every pair and let go before the policy is loaded: no second
model is ever in memory. A resumed run reads the numbers from its directory.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.data.render import Pair
from posttrain.errors import RecipeError
from posttrain.models import load as models
from posttrain.models.load import LoadedModel
from posttrain.recipe.stages import DpoRecipe
from posttrain.run.directory import RunDirectory
from posttrain.run.durable import sync_file, told_when_full
from posttrain.train import distributed, pair_columns

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
    """field of a PairBatch -> its value for each pair, for every policy of the recipe's `anchors`.

    given: columns of the data. Raises RecipeError where they hold what `anchors` names too, ModelError for a model
    with another vocabulary.
    """
    named = recipe.anchors
    found: pair_columns.Columns = {}
    for key, need in (("reference", "ref_logp"), ("previous", "prev_logp")):
        path = getattr(named, key)
        if path is None:
            continue
        logps = _of(path, f"anchors.{key}", recipe, directory, pairs, tokenizer, measure)
        for side, field in zip(SIDES, pair_columns.ANCHORS[need], strict=True):
            found[field] = logps[side].tolist()
    past = [
        _of(path, f"anchors.history.{number}", recipe, directory, pairs, tokenizer, measure)
        for number, path in enumerate(named.history)
    ]
    for side, field in zip(SIDES, pair_columns.ANCHORS["history"], strict=True):
        if past:
            found[field] = torch.stack([logps[side] for logps in past], 1).tolist()
    for field in found:
        if field in given:
            raise RecipeError(
                f"the data has the column `{field}`, and `anchors` names a model for it",
                hint="remove one of the two",
            )
    return found


def _of(
    path: str,
    key: str,
    recipe: DpoRecipe,
    directory: RunDirectory,
    pairs: Sequence[Pair],
    tokenizer: Any,
    measure: Measure,
) -> Logps:
    """Log-probs by the model at `path`, from the run directory where they are there already."""
    cache = directory.path / f"{key}.safetensors"
    stored = distributed.on_main(cached_logps, cache, pairs)
    if stored is not None:
        return stored
    loaded = models.second(recipe.model, path, recipe.base_dir, tokenizer, key=key, seed=recipe.run.seed)
    logps = measure(loaded)
    distributed.on_main(store_logps, cache, pairs, logps)
    del loaded
    gc.collect()
    return logps


def cached_logps(cache: Path, pairs: Sequence[Pair]) -> dict[str, Tensor] | None:
    """What `store_logps` wrote for these very pairs, or None."""
    if not cache.exists():
        return None
    stored = load_file(cache)
    return {side: stored[side] for side in SIDES} if torch.equal(stored["pairs"], fingerprint(pairs)) else None


def store_logps(cache: Path, pairs: Sequence[Pair], logps: Logps) -> None:
    """Write in one step: a kill leaves no half-written file under this name."""
    partial = cache.with_suffix(".partial")
    with told_when_full(cache):
        save_file({**{k: v.contiguous() for k, v in logps.items()}, "pairs": fingerprint(pairs)}, partial)
        sync_file(partial)
        partial.replace(cache)


def fingerprint(pairs: Sequence[Pair]) -> Tensor:
    """A hash of all token ids in order, [32] uint8."""
    tokens = [[list(p.prompt_ids), list(p.chosen_ids), list(p.rejected_ids)] for p in pairs]
    return torch.tensor(list(hashlib.sha256(json.dumps(tokens).encode()).digest()), dtype=torch.uint8)
