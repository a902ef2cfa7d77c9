"""An error that comes before a step's update ends the run, and loses nothing of the steps that are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.run import checkpoints
from posttrain.run.directory import RunDirectory
from posttrain.train import checkpoint, distributed
from posttrain.train.pieces import Pieces


@contextmanager
def salvaged(
    p: Pieces, state: checkpoint.State, directory: RunDirectory, *, drawn_ahead: bool, note: Callable[[str], None]
) -> Iterator[None]:
    """Around what draws and scores a step's rollouts (an engine that dies, a reward that fails, too few groups that
    pass `keep`): an error inside leaves a checkpoint of the step before, and goes on.

    drawn_ahead: those rollouts belong to the checkpoint (`rollout.staleness`), and what failed cannot be in it. A run
    that goes on from there draws them with newer weights, so an older checkpoint, if there is one, stays the newest.
    Several processes keep what they have: they fail one by one, and saving is done together.
    """
    before = dataclasses.replace(state)  # drawing moves the place in the data
    try:
        yield
    except Exception:
        older = checkpoints.latest(directory.checkpoints)
        exact = older is None or not drawn_ahead
        if before.step and exact and distributed.world() == 1:
            _save(p, before, directory, note)
        raise


def _save(p: Pieces, state: checkpoint.State, directory: RunDirectory, note: Callable[[str], None]) -> None:
    more = [p.opponent.save] if p.opponent is not None else []
    keep = p.recipe.run.keep_checkpoints
    try:
        checkpoint.save(directory.checkpoints, state, p.loaded, p.optimizer, keep, p.critic, *more)
    except Exception as error:  # a full disk, say; the error that brought us here is the one to raise
        note(f"the checkpoint of step {state.step} could not be written: {error}")
    else:
        note(f"saved after step {state.step}: the next step failed before its update")
