"""Reinforcement learning with verifier rewards. One step, top to bottom:

engine sync -> prompts -> rollouts -> scores -> keep -> advantages -> loss over minibatches -> optimiser.

The sync brings the weights of the step before; the engine starts with those of the first. An error in it, or up to the
first optimiser update, finds that step finished and loses nothing (`emergency_checkpoint`).

With `rollout.staleness: k` a step trains on rollouts that were begun k steps before (`rollout_source`).

With several processes (`distributed`), each samples and scores a share of the prompts and trains on a share of the
rows; between the two, all of them hold the rollouts of the whole step.

All randomness is derived from (seed, purpose, step): a resumed run draws what an unbroken run draws.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.batch import Rollout
from posttrain.errors import Interrupted
from posttrain.models.save import save
from posttrain.models.save_adapter import merged_note
from posttrain.recipe.objective_checks import stale_notes
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.starting import wait_for
from posttrain.run import checkpoints
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.progress import Progress
from posttrain.run.watchdog import Watchdog
from posttrain.train import checkpoint, distributed, optim, saved_rollouts, sharding, trained
from posttrain.train.assemble import assembled, audited, prepared
from posttrain.train.collate import sequences_of
from posttrain.train.collect import batch_of
from posttrain.train.context import TrainContext
from posttrain.train.critic import save_head
from posttrain.train.emergency_checkpoint import save_on_error, save_step
from posttrain.train.fit import check_room, naps, try_longest
from posttrain.train.peak import peak_memory
from posttrain.train.plan import explained_out_of_memory
from posttrain.train.policy import measure
from posttrain.train.quiet import quiet
from posttrain.train.record import Record
from posttrain.train.reference import describe_reference
from posttrain.train.rl_metrics import age_metrics, drift_metrics, rollout_metrics, sampled_metrics
from posttrain.train.rollout_source import RolloutSource, rollout_source
from posttrain.train.start import check_start
from posttrain.train.update import update
from posttrain.verify import correctness
from posttrain.verify.printed import Printed
from posttrain.verify.score import Scorer

COLUMNS = ("reward", "correct", "signal/share", "updates", "completions/mean_length", "grad_norm", "time/step")


def run(recipe: RlRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train, save the final model, return the summary. Resumes from the newest complete checkpoint, if any."""
    quiet()
    work = prepared(recipe)
    with (
        Progress("rl", work.steps, COLUMNS, max_minutes=recipe.run.max_minutes) as progress,
        scorer_of(recipe, directory, progress) as scorer,
        Watchdog(directory.logs, recipe.run.hang_minutes) as watchdog,
    ):
        if not correctness.is_judged(scorer.sections[scorer.correctness], scorer.rewards[scorer.correctness]):
            progress.columns = tuple(key for key in COLUMNS if key != "correct")
        audited(recipe, work, scorer, progress.note)
        with assembled(recipe, directory, work, scorer, watchdog, progress.note) as pieces:
            whose = describe_reference(recipe, work.objective.needs, pieces.loaded.source)
            unsaved = checkpoints.none_before_the_end(recipe.run.save_every, work.steps)
            for note in (merged_note(pieces.loaded), whose, *stale_notes(recipe), unsaved):
                if note:
                    progress.note(note)
            # until here there is nothing to finish, and Ctrl-C ends the run at once
            with GracefulStop() as stop, closing(rollout_source(pieces)) as source:
                return train(pieces, directory, progress, stop, source)


def scorer_of(recipe: RlRecipe, directory: RunDirectory, progress: Progress) -> Scorer:
    """The rewards, whose prints go to a log of the run."""
    printed = Printed(directory.logs, "rewards", progress.note)
    return Scorer(recipe.rewards, recipe.scoring, recipe.base_dir, printed)


@distributed.alarmed()
def train(
    p: TrainContext, directory: RunDirectory, progress: Progress, stop: GracefulStop, source: RolloutSource
) -> dict[str, Any]:
    """The loop over steps with its checkpoints, metrics and samples; then the final model and the summary."""
    also = partial(load_rest, p, source)
    state = checkpoint.restore(directory.checkpoints, p.loaded, p.optimizer, p.critic, also) or checkpoint.State()
    trained.check_asked(state.step, p.steps)
    explained = partial(explained_out_of_memory, p.recipe, p.loaded.model, p.longest, state, directory)
    saved_on_error = partial(save_on_error, p, state, directory, source, note=progress.note)
    with closing(Record(p, directory, progress, state)) as record:
        if state.step:
            progress.note(f"resumed after step {state.step}")
            each, last = p.updates_per_step, (state.last_metrics or {}).get("lr")
            planned = None if state.planned is None else state.planned * each
            if note := optim.changed_lr_note(p.recipe.optim, state.step * each, planned, p.steps * each, last):
                progress.note(note)
        else:
            with explained():
                prove(p, stop)
        with p.watchdog.phase("engine start"):
            wait_for(p.engine, lambda: bool(stop.asked))
        state.planned = p.steps
        if asked := max(distributed.gather(stop.asked)):  # there is nothing to save yet
            where = str(directory.path)
            raise Interrupted(f"stopped before step {state.step + 1} of {p.steps}", where=where, number=asked)
        progress.ready(p.watchdog.seconds)
        while not ended(p, state):
            started = time.perf_counter()
            p.watchdog.begin_step(state.step)
            with saved_on_error():
                controllers, numbers, now = distributed.together(controlled, p, state)
            with explained(), saved_on_error():
                rollouts, values, saved = step(now, state, source)
            values |= {f"control/{key}": number for key, number in numbers.items()}
            values = finish_step(p, state, values, controllers, started)
            asked = max(distributed.gather(stop.asked))
            given_up = trained.check_patience(state, p.recipe.run.max_idle_steps)
            with record.add(state, values, rollouts, saved):
                if asked or given_up or ended(p, state) or due(p, state):
                    with saved_on_error():
                        source.finish(p, state)
                    record.settle(state)
                    save_step(p, state, directory, source)
                    values |= state.count_save(distributed.from_main(p.watchdog.seconds["save"]))
            if given_up:
                raise given_up
            if asked and not ended(p, state):
                where = str(directory.path)
                raise Interrupted(f"stopped after step {state.step} of {p.steps}", where=where, number=asked)
        return finish(p, state, directory, record)


def step(
    p: TrainContext, state: checkpoint.State, source: RolloutSource
) -> tuple[list[Rollout], dict[str, Any], saved_rollouts.Saved]:
    """One RL step on the rollouts that `source` gives. Returns them, the step's metrics, and what `whatif` needs of
    them; moves `state` past the prompts that they answer."""
    rollouts, gathered = source.next(p, state)
    sequences = sequences_of(rollouts)
    state.tokens += sum(sequences.lengths)
    scored = batch_of(p, rollouts, state).to(p.loaded.device)
    with p.watchdog.phase("measure"), p.compiled():
        scored = measure(p, scored, sequences, range(len(scored)), p.objective.needs_before_the_loss)
    batch = p.objective.assign(scored)
    state.memory = dict(batch.memory)
    values = {**gathered, **rollout_metrics(rollouts, batch), **p.objective.paid_kl_metrics(scored)}
    values["num_tokens"] = state.tokens

    with p.watchdog.phase("update"), p.compiled():
        before = None if state.updates else trained.fingerprint(p.optimizer)
        metrics, measured, logp = update(p, batch, sequences, state.step)
        if not trained.moved(before, p.optimizer):
            metrics["updates"] = 0
    state.count_tokens(metrics["trained_tokens"] / p.recipe.batch.epochs, float(scored.mask.sum()), metrics["updates"])
    state.scaler = p.scaler.state_dict()
    if p.opponent is not None:
        p.opponent.follow(p.loaded.model)
    values |= sampled_metrics(scored, p.recipe.rollout, metrics["trained_tokens"], p.recipe.batch.epochs)
    if p.recipe.rollout.staleness:
        values |= age_metrics(scored, state.step)
        values |= drift_metrics(scored, logp if measured.old_logp is None else measured.old_logp, state.step)
    return rollouts, {**values, **metrics}, saved_rollouts.of(scored, measured, logp)


def load_rest(p: TrainContext, source: RolloutSource, folder: Path, state: checkpoint.State) -> None:
    """Bring to a checkpoint's step what `checkpoint.restore` leaves to us: everything but model and optimiser, and the
    engine, which is synced before it draws."""
    if p.opponent is not None:
        p.opponent.load(folder)
    source.load(folder, p, state)
    if state.scaler:
        p.scaler.load_state_dict(state.scaler)


def controlled(p: TrainContext, state: checkpoint.State) -> tuple[dict[str, Any], dict[str, float], TrainContext]:
    """For the step to come: the states of the controllers, which hear of the step before, the numbers that they give,
    and what the step works with."""
    if state.controllers is None or state.last_metrics is None:
        states = p.controls.start()
    else:
        states = p.controls.update(state.controllers, state.last_metrics, state.step - 1)
    numbers = p.controls.numbers(states, state.step)
    return states, numbers, p.at(numbers)


def prove(p: TrainContext, stop: GracefulStop) -> None:
    """Before step 1: the model computes what it should, and on a GPU the longest rows have room beside the engine.

    An engine that is starting goes on meanwhile. When someone asks to stop it is not waited for.
    """
    check_start(p)
    if p.loaded.device.type == "cuda":
        with p.watchdog.phase("longest rows"):
            taken = try_longest(p)
        with p.watchdog.phase("engine start"):
            wait_for(p.engine, lambda: bool(stop.asked))
        if not naps(p):
            check_room(taken)


def finish_step(
    p: TrainContext, state: checkpoint.State, values: dict[str, Any], controllers: dict[str, Any], started: float
) -> dict[str, Any]:
    """Move the counters past a step that these controllers drove; returns its metrics with the times. All ranks go by
    rank 0's clock and numbers: they decide alike."""
    values |= {**p.watchdog.times(), **peak_memory()}
    values["time/step"] = time.perf_counter() - started
    values = distributed.from_main(values)
    state.controllers = controllers
    state.count_step(values["time/step"], values["updates"])
    state.first_metrics, state.last_metrics = state.first_metrics or values, values
    return values


def ended(p: TrainContext, state: checkpoint.State) -> bool:
    """Whether the steps or the minutes of the run are used up."""
    return state.step >= p.steps or state.out_of_time(p.recipe.run.max_minutes)


def due(p: TrainContext, state: checkpoint.State) -> bool:
    """Whether the recipe asks for a checkpoint of this step."""
    every = p.recipe.run.save_every
    return every is not None and state.step % every == 0


def finish(p: TrainContext, state: checkpoint.State, directory: RunDirectory, record: Record) -> dict[str, Any]:
    """Save the model that the run ends with; returns the summary. Raises NothingTrained if no step made an update."""
    trained.check_end(state)
    started = time.perf_counter()
    with p.watchdog.phase("final save"):
        report = distributed.on_main(save, sharding.whole(p.loaded), directory.final)
        if p.critic is not None and p.recipe.critic.path is None:
            distributed.on_main(save_head, p.critic, directory.final)
    return {
        "steps": state.step,
        "train_seconds": state.seconds,
        "save_seconds": state.save_seconds + state.own_save + time.perf_counter() - started,
        "reward_first": (state.first_metrics or {}).get("reward"),
        "reward_last": (state.last_metrics or {}).get("reward"),
        "num_tokens": state.tokens,
        **trained.summary(state),
        "model": str(directory.final),
        "save": report,
        **({"canaries": found} if (found := record.canaries.summary()) else {}),
    }
