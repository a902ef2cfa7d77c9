"""Full micro-batches of random tokens: the memory probe before step 1, and the calibration of `posttrain plan`."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from posttrain.models import load as models
from posttrain.recipe.stages import RlRecipe
from posttrain.train import distributed
from posttrain.train.attention import enable_packing
from posttrain.train.collate import Sequences
from posttrain.train.collectives import local
from posttrain.train.context import TrainContext
from posttrain.train.logprobs import Extras, completion_logprobs
from posttrain.train.memory import GIB
from posttrain.train.optimizers import layer_matrices
from posttrain.train.policy import scores


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


def probe_max_memory(ctx: TrainContext) -> int:
    """Run forward and backward of a full micro-batch of the longest rows, with the optimizer's moments allocated.

    The engine sleeps if it does so in a step. Weights and random state are unchanged. Returns the peak bytes reserved
    by torch's allocator. Raises torch.OutOfMemoryError.
    """
    if engine_sleeps(ctx):
        ctx.engine.sleep()
    rollout = ctx.recipe.rollout
    rows = random_rows(ctx.recipe, ctx.loaded, ctx.longest)
    updated = math.ceil(rollout.prompts_per_step * rollout.group_size / ctx.recipe.batch.minibatches)
    rows = rows.select(range(min(len(rows), math.ceil(updated / distributed.world()))))
    ctx.loaded.model.train()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with ctx.loaded.fork_rng(), ctx.compiled():
        held = torch.empty(moments_bytes(ctx), dtype=torch.uint8, device=ctx.loaded.device)
        found = scores(ctx, ctx.loaded.model, rows, rollout.max_new_tokens, Extras())
        (found["logp"].sum() * 0).backward()
    del held, found
    ctx.optimizer.zero_grad(set_to_none=True)
    taken = torch.cuda.max_memory_reserved() if gpu else 0
    if gpu:
        torch.cuda.empty_cache()  # so that the first step finds contiguous memory
    if engine_sleeps(ctx):
        ctx.engine.sync(ctx.loaded.model, 0)  # the engine may have discarded its weights while asleep
    return taken


def engine_sleeps(ctx: TrainContext) -> bool:
    """Return whether the engine frees its memory for the update."""
    return ctx.recipe.rollout.engine == "vllm" and ctx.recipe.rollout.vllm.sleep


def check_free_memory(taken: int) -> None:
    """Raise torch.OutOfMemoryError unless `taken` bytes of this process fit next to all other processes.

    Other processes include the engine, which may have grown since the probe.
    """
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    if taken + others > total:
        raise torch.OutOfMemoryError(f"{taken} bytes for the trainer and {others} of others on a GPU of {total}")


def moments_bytes(ctx: TrainContext) -> int:
    """Return the bytes of optimizer moments of this rank; 0 if they can be moved off the GPU.

    Two float32 numbers per trained weight, two bytes in 8 bits; one float32 number per weight with Muon.
    """
    section = ctx.recipe.optim
    if section.offload:
        return 0
    each = {"adamw": 8, "muon": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}[section.use]
    found = each * sum(local(w).numel() for w in ctx.loaded.model.parameters() if w.requires_grad)
    return found - (4 * sum(w.numel() for w in layer_matrices(ctx.loaded.model)) if section.use == "muon" else 0)
