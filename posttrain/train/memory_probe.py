"""Before step 1: does the largest micro-batch that a step can have fit beside all else?"""

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


def probe_max_memory(p: TrainContext) -> int:
    """Forward and backward of a full micro-batch of the longest rows, beside memory for the optimiser's moments.

    The engine sleeps if it does so in a step. Nothing is learnt or drawn. Returns the bytes that torch's allocator held
    at most. Raises torch.OutOfMemoryError.
    """
    if naps(p):
        p.engine.sleep()
    rollout = p.recipe.rollout
    rows = random_rows(p.recipe, p.loaded, p.longest)
    updated = math.ceil(rollout.prompts_per_step * rollout.group_size / p.recipe.batch.minibatches)
    rows = rows.select(range(min(len(rows), math.ceil(updated / distributed.world()))))
    p.loaded.model.train()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    random_state = torch.random.fork_rng() if gpu else nullcontext()
    with random_state, p.compiled():
        held = torch.empty(moments_bytes(p), dtype=torch.uint8, device=p.loaded.device)
        found = scores(p, p.loaded.model, rows, rollout.max_new_tokens, Extras())
        (found["logp"].sum() * 0).backward()
    del held, found
    p.optimizer.zero_grad(set_to_none=True)
    taken = torch.cuda.max_memory_reserved() if gpu else 0
    if gpu:
        torch.cuda.empty_cache()  # the first step finds the memory in one piece
    if naps(p):
        p.engine.sync(p.loaded.model, 0)  # it may have slept without its weights
    return taken


def naps(p: TrainContext) -> bool:
    """Whether the engine gives its memory to the trainer for the update."""
    return p.recipe.rollout.engine == "vllm" and p.recipe.rollout.vllm.sleep


def check_room(taken: int) -> None:
    """Whether the GPU has room for `taken` bytes of this process beside what others, the engine among them, hold on it
    now: an engine that was starting may have grown since that was tried. Raises torch.OutOfMemoryError."""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    if taken + others > total:
        raise torch.OutOfMemoryError(f"{taken} bytes for the trainer and {others} of others on a GPU of {total}")


def moments_bytes(p: TrainContext) -> int:
    """Of this rank: two float32 numbers a trained weight, or two bytes; one number of Muon; none that can leave the
    GPU."""
    section = p.recipe.optim
    if section.offload:
        return 0
    each = {"adamw": 8, "muon": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}[section.use]
    found = each * sum(local(w).numel() for w in p.loaded.model.parameters() if w.requires_grad)
    return found - (4 * sum(w.numel() for w in layer_matrices(p.loaded.model)) if section.use == "muon" else 0)
