"""Supervised steps between RL steps, on the solutions of prompts that no rollout has solved (`solutions.sft`).

Their buffer is a part of `State.memory`, so checkpoints contain it. Checkpoints also contain the moments of their
optimizer, which is separate from the one of RL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer

from posttrain.batch import Rollout, RolloutBatch
from posttrain.loss.hybrid import nll_less_entropy
from posttrain.models.load import LoadedModel
from posttrain.recipe.stages import RlRecipe
from posttrain.seeds import derive
from posttrain.train import checkpoint, optim
from posttrain.train.collate import with_images
from posttrain.train.context import TrainContext
from posttrain.train.objective import BoundComponent, Objective
from posttrain.train.own_rows import assign_rows
from posttrain.train.update import UpdateStats, minibatches, update_once

MEMORY = "solutions.sft"  # key in State.memory: [[uid, step at which it was unsolved], ...], newest first
FILE = "sft_optimizer.pt"

T = TypeVar("T")


def build_sft_optimizer(recipe: RlRecipe, loaded: LoadedModel) -> Optimizer | None:
    """Build the optimizer of the supervised steps; None if the recipe has none."""
    if recipe.solutions is None or recipe.solutions.sft is None:
        return None
    return optim.build(loaded.model, recipe.optim.model_copy(update={"lr": recipe.solutions.sft.lr}))


def save(optimizer: Optimizer | None, folder: Path) -> None:
    """Write the optimizer's moments into a checkpoint."""
    if optimizer is not None:
        torch.save(optimizer.state_dict(), folder / FILE)


def load(optimizer: Optimizer | None, folder: Path) -> None:
    """Read the optimizer's moments from a checkpoint."""
    if optimizer is not None:
        optimizer.load_state_dict(torch.load(folder / FILE, map_location="cpu", weights_only=True))


def supervise(ctx: TrainContext, state: checkpoint.State, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Collect the prompts that a step's rollouts have not solved; run one epoch on the newest once there are enough.

    Updates `state.memory` and returns metrics.
    """
    section = ctx.recipe.solutions.sft if ctx.recipe.solutions else None
    if section is None:
        return {}
    rewards: dict[str, list[float | None]] = {}
    for rollout in rollouts:
        if not rollout.is_given and rollout.prompt.uid in ctx.solutions:
            rewards.setdefault(rollout.prompt.uid, []).append(rollout.reward)
    failed = [uid for uid, own in rewards.items() if has_failed(own, section.fail_value)]
    buffer = [(str(uid), int(step)) for uid, step in state.memory.get(MEMORY, ())]
    repeated = [entry for entry in buffer if section.dedupe and entry[0] in failed]
    buffer = with_newest(buffer, [(uid, state.step) for uid in failed], repeated)
    chosen, buffer = take_batch(buffer, section.size)
    state.memory = {**state.memory, MEMORY: [list(entry) for entry in buffer]}
    values: dict[str, Any] = {"sft/collected": len(failed), "sft/buffer": len(buffer), "sft/rows": len(chosen)}
    if buffer:
        values["sft/oldest"] = state.step - min(step for _, step in buffer)
    return values | (_epoch(ctx, state.step, [uid for uid, _ in chosen]) if chosen else {})


def _epoch(ctx: TrainContext, step: int, uids: Sequence[str]) -> dict[str, Any]:
    """Train one epoch on the solutions of these prompts, in minibatches, with the separate optimizer."""
    assert ctx.recipe.solutions is not None and ctx.recipe.solutions.sft is not None and ctx.sft_optimizer is not None
    section, prompts = ctx.recipe.solutions.sft, {prompt.uid: prompt for prompt in ctx.prompts}
    ids = tuple(np.array(prompts[uid].ids + ctx.solutions[uid], np.int64) for uid in uids)
    sequences = with_images(ids, tuple(len(prompts[uid].ids) for uid in uids), [prompts[uid].shown for uid in uids])
    lengths = torch.tensor([len(ctx.solutions[uid]) for uid in uids])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    batch = RolloutBatch(group_ids=torch.arange(len(uids)), mask=mask, advantages=torch.ones(len(uids)))
    batch = batch.to(ctx.loaded.device)
    part = BoundComponent("loss", "sft", "solutions.sft", nll_less_entropy, {"entropy_coef": section.entropy_coef},
                frozenset({"new_entropy", "every_row"}))  # fmt: skip
    recipe = ctx.recipe.model_copy(
        update={"optim": ctx.recipe.optim.model_copy(update={"max_grad_norm": section.max_grad_norm})}
    )
    supervised = dataclasses.replace(
        ctx,
        recipe=recipe,
        objective=Objective(advantage=part, surrogate=part, aggregation="token_mean"),
        optimizer=ctx.sft_optimizer,
        critic=None,
    )
    count = -(-len(uids) // section.minibatch)
    seed = derive(ctx.recipe.run.seed, "unsolved", step)
    ctx.loaded.model.train()
    parts = minibatches(batch.group_ids, count, seed)
    rows_of = assign_rows(supervised, batch, sequences.lengths, parts)
    batch, sequences = rows_of.select_batch(batch), rows_of.select_sequences(sequences)
    stats = UpdateStats(torch.zeros(batch.mask.shape, device=batch.mask.device))
    updates = sum(update_once(supervised, batch, sequences, rows, step, stats, rows_of) for rows in parts)
    tokens = max(float(stats.sums["tokens"]), 1.0)
    return {
        "sft/loss": float(stats.sums["loss"]) / len(parts),
        "sft/nll": float(stats.sums["nll"]) / tokens,
        "sft/updates": updates,
        "sft/grad_norm": sum(stats.norms) / max(len(stats.norms), 1),
    }


def has_failed(rewards: Sequence[float | None], fail_value: float = 0.0) -> bool:
    """Return whether a prompt goes into the buffer: all of its rewards equal `fail_value` (well formed but wrong).

    A group with any other reward, such as that of a format failure, does not.
    """
    return bool(rewards) and all(reward == fail_value for reward in rewards)


def with_newest(buffer: Sequence[T], newest: Sequence[T], same: Sequence[T] = ()) -> list[T]:
    """Return the buffer with the step's new entries in front, in batch order. same: older entries that they replace."""
    return [*newest, *(entry for entry in buffer if entry not in same)]


def take_batch(buffer: Sequence[T], size: int = 128) -> tuple[list[T], list[T]]:
    """Return (first `size` entries, remaining entries); the batch is empty if there are fewer, or for size < 1."""
    count = size if len(buffer) >= size > 0 else 0
    return list(buffer[:count]), list(buffer[count:])
