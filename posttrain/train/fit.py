"""Before step 1: does the largest micro-batch that a step can have fit beside all else?"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from posttrain.train import distributed, sharding
from posttrain.train.calibrate import random_rows
from posttrain.train.logprobs import Extras
from posttrain.train.pieces import Pieces
from posttrain.train.policy import scores


def try_longest(p: Pieces) -> None:
    """Forward and backward of a full micro-batch of the longest rows, beside memory for the optimiser's moments.

    The engine sleeps if it does so in a step. Nothing is learnt or drawn. Raises torch.OutOfMemoryError.
    """
    naps = p.recipe.rollout.engine == "vllm" and p.recipe.rollout.vllm.sleep
    if naps:
        p.engine.sleep()
    rollout = p.recipe.rollout
    rows = random_rows(p.recipe, p.loaded, p.longest)
    updated = math.ceil(rollout.prompts_per_step * rollout.group_size / p.recipe.batch.minibatches)
    rows = rows.select(range(min(len(rows), math.ceil(updated / distributed.world()))))
    p.loaded.model.train()
    random_state = torch.random.fork_rng() if torch.cuda.is_available() else nullcontext()
    with random_state, p.compiled():
        held = torch.empty(moments_bytes(p), dtype=torch.uint8, device=p.loaded.device)
        found = scores(p, p.loaded.model, rows, rollout.max_new_tokens, Extras())
        (found["logp"].sum() * 0).backward()
    del held, found
    p.optimizer.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the first step finds the memory in one piece
    if naps:
        p.engine.sync(p.loaded.model, 0)  # it may have slept without its weights


def moments_bytes(p: Pieces) -> int:
    """Of this rank: two float32 numbers a trained weight, or two bytes; none that can leave the GPU."""
    each = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}[p.recipe.optim.use]
    return each * sum(sharding.local(w).numel() for w in p.loaded.model.parameters() if w.requires_grad)
