"""Checkpoints of a run, and the one that an error leaves behind.

An error that comes before an optimiser has begun to change weights ends the run, and loses nothing of the steps that
are done. The sync that brings their weights to the engine is a part of the step that begins. After the first update of
a step its weights are those of no step: nothing is saved then, and a note says so.

Several ranks: an error of one is raised on all where they meet (`distributed.gather_or_raise`); all are still there,
and save together as they do after a step. Where one is gone (killed, or failed where the others do not look), nobody
can be asked: rank 0 saves by itself, for it has all that a checkpoint holds, and what it writes counts only when it is
sealed. A divided model in full training is on no rank as a whole, and is not saved then; an adapter on one is. Nobody
saves if it is rank 0 that is gone.

With `rollout.staleness: k` a checkpoint of the first t steps needs the rollouts of steps t to t+k-1, which older
weights have begun: those weights are gone, so a run that went on without these rollouts would draw them with newer
ones. If they are there, or come within a minute, they go into the checkpoint, and a run goes on from it exactly. If the
error is in one of them, an older checkpoint, if there is one, stays the newest. Rollouts of step t+k are begun with the
weights of the checkpoint itself and can be drawn again.
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
from posttrain.train.reference import RenewedReference
from posttrain.train.rollout_source import RolloutSource

Note = Callable[[str], None]  # says a line to people


@contextmanager
def save_on_error(
    ctx: TrainContext, state: checkpoint.State, directory: RunDirectory, source: RolloutSource, *, note: Note
) -> Iterator[None]:
    """Around a step of rl, and around what is done between two: an error inside (an engine that dies, a reward that
    fails, too few groups that pass `keep`, a GPU that is full in a backward pass) leaves a checkpoint of the step
    before, and goes on."""
    before = dataclasses.replace(state)  # sampling moves the place in the data
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
    """Have `save(alone=...)` write a checkpoint of the `done` steps, unless there is one; a note says what became of
    it. An asynchronous save of an earlier step is waited for first; where it failed, a note says so.

    models: what is trained. whole: their weights are those of that step. exact: a run goes on from the checkpoint as if
    nothing had been; otherwise an older one is worth more.
    """
    together = distributed.all_ranks_raise(error)
    try:
        divided_checkpoint.wait_for_save()  # of an earlier step, which decides what is saved
    except Exception as failed:
        note(f"the newest checkpoint was not written: {failed}")
    trained = (weight for model in models for weight in model.parameters() if weight.requires_grad)
    divided = any(isinstance(weight, DTensor) for weight in trained)
    if not together and (divided or not distributed.is_main()):
        return
    newest = checkpoints.latest(directory.checkpoints)
    worth_it = newest is None or (exact and checkpoints.step_of(newest) < done)
    if not (distributed.broadcast_from_rank0(worth_it) if together else worth_it):
        return
    if not whole:
        note(f"not saved after step {done}: the next step failed after it had begun to change the weights")
        return
    sick = isinstance(error, NonFiniteError) and not all(map(has_finite_weights, models))
    if distributed.any_rank(sick) if together else sick:
        note(f"not saved after step {done}: its weights are not finite")
        return
    for model in models:
        model.zero_grad(set_to_none=True)  # room, where a GPU is full
    try:
        save(alone=not together)
    except Exception as failed:  # a full disk, say; the error that brought us here is the one to raise
        note(f"not saved after step {done}: {failed}")
    else:
        note(f"saved after step {done}: the next step failed before its update")


def has_finite_weights(model: nn.Module) -> bool:
    """Whether all weights that are trained are finite."""
    trained = (local(weight.detach()) for weight in model.parameters() if weight.requires_grad)
    return all(bool(torch.isfinite(weight).all()) for weight in trained)


def save_step(
    ctx: TrainContext,
    state: checkpoint.State,
    directory: RunDirectory,
    source: RolloutSource | None,
    *,
    alone: bool = False,
    wait: bool = True,
) -> None:
    """A checkpoint of the step that is done, with the opponent and the rollouts of steps to come (source None: without
    them). alone, wait: see `checkpoint.save`."""

    def save_more(folder: Path) -> None:
        if ctx.opponent is not None:
            ctx.opponent.save(folder)
        if ctx.proximal is not None:
            ctx.proximal.save(folder)
        if isinstance(ctx.reference, RenewedReference):
            ctx.reference.save(folder)
        if ctx.values is not None:
            ctx.values.save(folder)
        if ctx.replay is not None:
            ctx.replay.save(folder)
        unsolved.save(ctx.sft_optimizer, folder)
        if source is not None:
            source.save(folder, state.step)

    keep = ctx.recipe.run.keep_checkpoints
    root = directory.checkpoints
    with ctx.watchdog.phase("save"):
        checkpoint.save(root, state, ctx.loaded, ctx.optimizer, keep, ctx.critic, save_more, alone=alone, wait=wait)
