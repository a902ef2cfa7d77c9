"""Calibration of plan estimates: time and memory of two micro-batches, measured on this machine's GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from posttrain.models import load as models
from posttrain.recipe.stages import RlRecipe
from posttrain.train.attention import enable_packing
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.memory import GIB


def calibrate(recipe: RlRecipe, *, prompt: int, tokens_a_step: int) -> dict[str, float]:
    """Measure full micro-batches of random tokens, forward and backward; estimate `update_s` for `tokens_a_step`
    tokens.

    Generation and scoring are not measured: an engine takes a minute to start. prompt: tokens per prompt.
    """
    loaded = models.load(recipe.model, recipe.base_dir, seed=recipe.run.seed, training=True)
    loaded.model.train()
    packed = enable_packing(loaded.model, loaded.device)
    sequences = random_rows(recipe, loaded, prompt)
    measured: dict[str, float] = {}
    for _ in range(2):  # the first iteration compiles and fills caches
        started = _clock(loaded.device)
        with loaded.autocast():
            logp, _ = completion_logprobs(loaded.model, sequences, recipe.rollout.max_new_tokens, packed=packed)
        logp.sum().backward()
        measured["micro_batch_s"] = _clock(loaded.device) - started
    per_token = measured["micro_batch_s"] / sum(sequences.lengths)
    measured["update_s"] = per_token * tokens_a_step * recipe.batch.epochs
    if loaded.device.type == "cuda":  # excludes the optimizer's moments and the engine
        measured["model_and_micro_batch_gib"] = torch.cuda.max_memory_allocated() / GIB
    return measured


def random_rows(recipe: RlRecipe, loaded: Any, prompt: int) -> Sequences:
    """Return random rows of maximum length that fill one micro-batch."""
    length = prompt + recipe.rollout.max_new_tokens
    rows = max(1, recipe.batch.micro_tokens // length)
    size = loaded.model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, size, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    return Sequences(tuple(tuple(row) for row in ids), (prompt,) * rows)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
