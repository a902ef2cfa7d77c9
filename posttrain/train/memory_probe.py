"""Memory probe before step 1: checks that the largest micro-batch of a step fits next to everything else on the GPU."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from posttrain.train import distributed
from posttrain.train.calibrate import random_rows
from posttrain.train.collectives import local
from posttrain.train.context import TrainContext
from posttrain.train.logprobs import Extras
from posttrain.train.muon import layer_matrices
from posttrain.train.policy import scores


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
    random_state = torch.random.fork_rng() if gpu else nullcontext()
    with random_state, ctx.compiled():
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
