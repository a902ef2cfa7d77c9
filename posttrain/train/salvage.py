"""An error that comes before an optimiser has begun to change weights ends the run, and loses nothing of the steps that
are done. The sync that brings their weights to the engine is a part of the step that begins. Behind the first update of
a step its weights are those of no step: nothing is saved then, and it is said.

Several ranks: an error of one is told to all where they meet (`distributed.all_of`); all are still there, and save
together as they do after a step. Where one is gone (killed, or failed where the others do not look), nobody can be
asked: rank 0 saves by itself, for it has all that a checkpoint holds, and what it writes counts only when it is
sealed. A divided model is on no rank as a whole, and is not saved then. Nobody saves if it is rank 0 that is gone.

`rollout.staleness: 1`: the rollouts of the step that failed are there, whole, if it was its update that failed, or if
those of the step behind it could not be drawn. They go into the checkpoint, and a run goes on from it as if nothing had
been. If its own could not be drawn, beside the update of the step before, they never will be: the weights that drew
them are gone. A run that went on would draw them with newer ones, so an older checkpoint, if there is one, stays the
newest.
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
from posttrain.train import checkpoint, distributed, optim, sharding
from posttrain.train.overlap import Ahead
from posttrain.train.pieces import Pieces

Note = Callable[[str], None]  # says a line to people


@contextmanager
def salvaged(
    p: Pieces, state: checkpoint.State, directory: RunDirectory, ahead: Ahead | None, *, note: Note
) -> Iterator[None]:
    """Around a step of rl, and around what is done between two: an error inside (an engine that dies, a reward that
    fails, too few groups that pass `keep`, a GPU that is full in a backward pass) leaves a checkpoint of the step
    before, and goes on."""
    before = dataclasses.replace(state)  # drawing moves the place in the data
    with optim.begun(p.optimizer) as begun:
        try:
            yield
        except Exception as error:
            if before.step:
                exact = bool(begun()) or ahead is None or ahead.complete(before.step)
                save = partial(save_step, p, before, directory, ahead if exact else None)
                models = [p.loaded.model, *([p.critic] if p.critic is not None else [])]
                rescue(error, before.step, directory, models, save, whole=not begun(), exact=exact, note=note)
            raise


def rescue(
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
    """Have `save`, told whether it is alone, write a checkpoint of the `done` steps, unless there is one; says what
    became of it.

    models: what is trained. whole: their weights are those of that step. exact: a run goes on from the checkpoint as if
    nothing had been; otherwise an older one is worth more.
    """
    together = distributed.agreed(error)
    divided = any(isinstance(weight, DTensor) for model in models for weight in model.parameters())
    if not together and (divided or not distributed.is_main()):
        return
    newest = checkpoints.latest(directory.checkpoints)
    worth_it = newest is None or (exact and checkpoints.step_of(newest) < done)
    if not (distributed.from_main(worth_it) if together else worth_it):
        return
    if not whole:
        note(f"not saved after step {done}: the next step failed after it had begun to change the weights")
        return
    sick = isinstance(error, NonFiniteError) and not all(map(finite, models))
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


def finite(model: nn.Module) -> bool:
    """Whether all weights that are trained are finite."""
    trained = (sharding.local(weight.detach()) for weight in model.parameters() if weight.requires_grad)
    return all(bool(torch.isfinite(weight).all()) for weight in trained)


def save_step(
    p: Pieces, state: checkpoint.State, directory: RunDirectory, ahead: Ahead | None, *, alone: bool = False
) -> None:
    """A checkpoint of the step that is done, with the rollouts that are drawn ahead or the opponent. alone: see
    `checkpoint.save`."""
    more: Callable[[Path], None] = p.opponent.save if p.opponent is not None else lambda _: None
    if ahead is not None:
        more = partial(ahead.write, done=state.step)
    keep = p.recipe.run.keep_checkpoints
    with p.watchdog.phase("save"):
        checkpoint.save(directory.checkpoints, state, p.loaded, p.optimizer, keep, p.critic, more, alone=alone)
