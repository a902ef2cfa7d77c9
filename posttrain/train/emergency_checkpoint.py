"""Emergency checkpoint: saves the last finished step of an RL run when the next step fails.

An error raised before the optimizer has begun to change weights ends the run without losing a finished step: the
checkpoint of the step before is written. Syncing the new weights to the engine counts as part of the next step. After
the first update of a step, the weights belong to no finished step; nothing is saved then, and a note says why.

Several ranks: an error exchanged in `distributed.gather_or_raise` is raised on all ranks, which then save together as
after a regular step. If a rank is gone (killed, or failed outside such an exchange), no collective can run: rank 0
saves alone, because rank 0 holds everything that a checkpoint needs, and the checkpoint counts only once it is sealed.
A sharded model in full training is not whole on any rank and is not saved in that case; a LoRA adapter is. Nothing is
saved if rank 0 itself is gone.

With `rollout.staleness: k`, a checkpoint of the first t steps needs the rollouts of steps t to t+k-1. Older weights
began those rollouts and no longer exist, so a resumed run without the rollouts would sample with newer weights. If the
rollouts are complete, or complete within a minute, they are stored in the checkpoint and the run resumes exactly. If
the error came from one of these rollouts, an older checkpoint, if any, stays the newest. Rollouts of step t+k begin
with the weights of the checkpoint itself and can be sampled again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from posttrain.errors import NonFiniteError
from posttrain.run import checkpoints
from posttrain.run.directory import RunDirectory
from posttrain.train import checkpoint, distributed, divided_checkpoint, optim, unsolved
from posttrain.train.collectives import local
from posttrain.train.context import TrainContext
from posttrain.train.rollout_source import RolloutSource

Note = Callable[[str], None]  # prints one line for the user


@contextmanager
def save_on_error(
    ctx: TrainContext, state: checkpoint.State, directory: RunDirectory, source: RolloutSource, *, note: Note
) -> Iterator[None]:
    """Write a checkpoint of the step before if the block raises, then re-raise the error.

    Wraps an RL step, and the work between two steps. Examples of errors: an engine that dies, a reward that fails, too
    few groups that pass `keep`, a GPU out of memory in a backward pass.
    """
    before = dataclasses.replace(state)  # sampling advances the data position
    with optim.count_updates(ctx.optimizer, ctx.sft_optimizer) as begun:
        try:
            yield
        except Exception as error:
            if before.step:
                exact = bool(begun()) or source.can_save(before.step)
                save = partial(save_step, ctx, before, directory, source if exact else None)
                models = [ctx.loaded.model, *([ctx.critic] if ctx.critic is not None else [])]
                save_before_raising(
                    error, before.step, directory, models, save, whole=not begun(), exact=exact, note=note
                )
            raise


def save_before_raising(
    error: Exception,
    done: int,
    directory: RunDirectory,
    models: Sequence[nn.Module],
    save: Callable[..., object],
    *,
    whole: bool,
    exact: bool = True,
    note: Note,
) -> None:
    """Call `save(alone=...)` to checkpoint the `done` finished steps, unless such a checkpoint exists.

    Prints a note with the outcome. Waits first for an asynchronous save of an earlier step, and notes if that save
    failed.

    models: the trained modules. whole: their weights are those of step `done`. exact: a run resumed from the checkpoint
    continues as if uninterrupted; if False, an existing older checkpoint is preferred.
    """
    together = distributed.all_ranks_raise(error)
    try:
        divided_checkpoint.wait_for_save()  # an earlier asynchronous save: its outcome decides whether to save now
    except Exception as failed:
        note(f"the newest checkpoint was not written: {failed}")
    trained = [weight for model in models for weight in model.parameters() if weight.requires_grad]
    if not together and (any(isinstance(weight, DTensor) for weight in trained) or not distributed.is_main()):
        return
    newest = checkpoints.latest(directory.checkpoints)
    should_save = newest is None or (exact and checkpoints.step_of(newest) < done)
    if not (distributed.broadcast_from_rank0(should_save) if together else should_save):
        return
    if not whole:
        note(f"not saved after step {done}: the next step failed after it had begun to change the weights")
        return
    finite = (bool(torch.isfinite(local(weight.detach())).all()) for weight in trained)
    non_finite = isinstance(error, NonFiniteError) and not all(finite)
    if distributed.any_rank(non_finite) if together else non_finite:
        note(f"not saved after step {done}: its weights are not finite")
        return
    for model in models:
        model.zero_grad(set_to_none=True)  # frees memory if the GPU ran out
    try:
        save(alone=not together)
    except Exception as failed:  # e.g. a full disk; the original error is the one to raise
        note(f"not saved after step {done}: {failed}")
    else:
        note(f"saved after step {done}: the next step failed before its update")


def save_step(
    ctx: TrainContext,
    state: checkpoint.State,
    directory: RunDirectory,
    source: RolloutSource | None,
    *,
    alone: bool = False,
    wait: bool = True,
) -> None:
    """Write a checkpoint of the finished step, with the opponent and other parts that have state.

    source: source of the rollouts of coming steps, saved as well; None leaves them out. alone, wait: see
    `checkpoint.save`.
    """

    def save_more(folder: Path) -> None:
        for part in ctx.parts_with_state:
            part.save(folder)
        unsolved.save(ctx.sft_optimizer, folder)
        if source is not None:
            source.save(folder, state.step)

    keep = ctx.recipe.run.keep_checkpoints
    root = directory.checkpoints
    with ctx.watchdog.phase("save"):
        checkpoint.save(root, state, ctx.loaded, ctx.optimizer, keep, ctx.critic, save_more, alone=alone, wait=wait)
