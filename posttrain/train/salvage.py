"""An error that comes before a step's update ends the run, and loses nothing of the steps that are done. The sync that
brings their weights to the engine is a part of the step that begins.

Several ranks: an error of one is told to all where they meet (`distributed.all_of`); all are still there, and save
together as they do after a step. Where one is gone (killed, or failed where the others do not look), nobody can be
asked: rank 0 saves by itself, for it has all that a checkpoint holds, and what it writes counts only when it is
sealed. A divided model is on no rank as a whole, and is not saved then. Nobody saves if it is rank 0 that is gone.

`rollout.staleness: 1`: the rollouts of the step that failed are there, whole, if it was those of the step behind it
that could not be drawn. They go into the checkpoint, and a run goes on from it as if nothing had been. If its own
could not be drawn, beside the update of the step before, they never will be: the weights that drew them are gone. A run
that went on would draw them with newer ones, so an older checkpoint, if there is one, stays the newest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.run import checkpoints
from posttrain.run.directory import RunDirectory
from posttrain.train import checkpoint, distributed
from posttrain.train.overlap import Ahead
from posttrain.train.pieces import Pieces


@contextmanager
def salvaged(
    p: Pieces, state: checkpoint.State, directory: RunDirectory, ahead: Ahead | None, *, note: Callable[[str], None]
) -> Iterator[None]:
    """Around what syncs the engine, draws and scores a step's rollouts (an engine that dies, a reward that fails, too
    few groups that pass `keep`): an error inside leaves a checkpoint of the step before, and goes on."""
    before = dataclasses.replace(state)  # drawing moves the place in the data
    try:
        yield
    except Exception as error:
        together = distributed.agreed(error)
        if before.step and (together or (distributed.is_main() and not p.loaded.is_sharded)):
            _save(p, before, directory, ahead, together=together, note=note)
        raise


def _save(
    p: Pieces,
    state: checkpoint.State,
    directory: RunDirectory,
    ahead: Ahead | None,
    *,
    together: bool,
    note: Callable[[str], None],
) -> None:
    """together: all ranks call this; else rank 0 does."""
    complete = ahead is None or ahead.complete()
    newest = checkpoints.latest(directory.checkpoints)
    worth_it = newest is None or (complete and checkpoints.step_of(newest) < state.step)
    if not (distributed.from_main(worth_it) if together else worth_it):
        return
    try:
        save_step(p, state, directory, ahead if complete else None, alone=not together)
    except Exception as error:  # a full disk, say; the error that brought us here is the one to raise
        note(f"not saved after step {state.step}: {error}")
    else:
        note(f"saved after step {state.step}: the next step failed before its update")


def save_step(
    p: Pieces, state: checkpoint.State, directory: RunDirectory, ahead: Ahead | None, *, alone: bool = False
) -> None:
    """A checkpoint of the step that is done, with the rollouts that are drawn ahead or the opponent. alone: see
    `checkpoint.save`."""
    more = ahead.write if ahead is not None else p.opponent.save if p.opponent is not None else lambda _: None
    keep = p.recipe.run.keep_checkpoints
    with p.watchdog.phase("save"):
        checkpoint.save(directory.checkpoints, state, p.loaded, p.optimizer, keep, p.critic, more, alone=alone)
