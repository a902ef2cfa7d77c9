"""Reinforcement learning with verifier rewards. One step, top to bottom:

engine sync -> prompts -> rollouts -> scores -> keep -> advantages -> loss over minibatches -> optimiser.

The sync brings the weights of the step before; the engine starts with those of the first. An error in it, or up to the
first optimiser update, finds that step finished and loses nothing (`emergency_checkpoint`).

With `rollout.staleness: k` a step trains on rollouts that were begun k steps before (`rollout_source`).

With several processes (`distributed`), each samples and scores a share of the prompts and trains on a share of the
rows (`own_rows`); between the two, all of them know the rewards of the whole step. One alone goes through none of this.

All randomness is derived from (seed, purpose, step): a resumed run draws what an unbroken run draws.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch
from posttrain.curriculum.protocol import Group
from posttrain.errors import Interrupted
from posttrain.models.save_adapter import merged_note
from posttrain.recipe.objective_checks import band_notes, stale_notes
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.starting import wait_for
from posttrain.run import checkpoints, ledger, status
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.progress import Progress
from posttrain.run.watchdog import Watchdog
from posttrain.train import (
    checkpoint,
    distributed,
    optim,
    replay,
    saved_rollouts,
    start_notes,
    unsolved,
    update_check,
    windows,
)
from posttrain.train.assemble import audit_rewards, begin_engine, build_context, prepare_run
from posttrain.train.collate import Sequences, row_lengths, sequences_of, with_tokens
from posttrain.train.collect import batch_of
from posttrain.train.context import TrainContext
from posttrain.train.critic import save_head
from posttrain.train.emergency_checkpoint import save_on_error, save_step
from posttrain.train.evaluation import Evaluation
from posttrain.train.held_out import evaluate_step, rl_evaluation
from posttrain.train.library_logging import quiet
from posttrain.train.memory_plan import explain_out_of_memory
from posttrain.train.memory_probe import check_room, naps, probe_max_memory
from posttrain.train.model_checks import check_start
from posttrain.train.model_folder import save_model
from posttrain.train.own_rows import OwnRows, deal_rows, ranks_of_tokens
from posttrain.train.peak import peak_memory
from posttrain.train.policy import BESIDE, compute_logprobs, measure_beside
from posttrain.train.prompt_sampler import StepSampler, with_outcomes
from posttrain.train.record import Record, StepResult
from posttrain.train.reference import RenewedReference, describe_reference
from posttrain.train.rl_metrics import (
    age_metrics,
    drift_metrics,
    rollout_metrics,
    sampled_metrics,
    signal,
    thought_metrics,
    token_ledger,
)
from posttrain.train.rollout_source import RolloutSource, rollout_source
from posttrain.train.update import rows_of_step, update
from posttrain.train.variants import learnt, variant_metrics
from posttrain.train.workflow import learn_from
from posttrain.verify import correctness
from posttrain.verify.captured_output import Printed
from posttrain.verify.score import Scorer

COLUMNS = (
    *("reward", "correct", "signal/share", "updates", "completions/mean_length", "completions/clipped_ratio"),
    *("grad_norm", "time/step"),
)


def run(recipe: RlRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train, save the final model, return the summary. Resumes from the newest complete checkpoint, if any."""
    quiet()
    work = prepare_run(recipe)
    with (
        Progress("rl", work.steps, COLUMNS, max_minutes=recipe.run.max_minutes) as progress,
        scorer_of(recipe, directory, progress) as scorer,
        Watchdog(directory.logs, recipe.run.hang_minutes) as watchdog,
        begin_engine(recipe, directory, work) as begun,
    ):
        if not correctness.is_judged(scorer.sections[scorer.correctness], scorer.rewards[scorer.correctness]):
            progress.columns = tuple(key for key in COLUMNS if key != "correct")
        audit_rewards(recipe, work, scorer, progress.note)
        with build_context(recipe, directory, work, scorer, watchdog, progress.note, begun) as ctx:
            whose = describe_reference(recipe, work.objective.needs, ctx.loaded.source)
            unsaved = checkpoints.none_before_the_end(recipe.run.save_every, work.steps)
            begin = start_notes.start_notes(recipe, ctx.loaded.model, work.steps * ctx.updates_per_step)
            of_sampler = work.sampler.notes()
            few = (len(ctx.prompts), recipe.rollout.prompts_per_step, "prompt", "rollout.prompts_per_step")
            begin.append(start_notes.few_rows_note(*few) or "")
            begin.append(start_notes.shared_rows_note([prompt.row for prompt in work.prompts], work.held_out))
            for note in (
                merged_note(ctx.loaded),
                whose,
                *begin,
                *stale_notes(recipe),
                *band_notes(recipe),
                *of_sampler,
                unsaved,
            ):
                if note:
                    progress.note(note)
            # until here there is nothing to finish, and Ctrl-C ends the run at once
            evaluating = rl_evaluation(ctx, work.held_out, directory, progress.note)
            with evaluating as evaluation, GracefulStop() as stop, closing(rollout_source(ctx)) as source:
                return train(ctx, directory, progress, stop, source, evaluation)


def scorer_of(recipe: RlRecipe, directory: RunDirectory, progress: Progress) -> Scorer:
    """The rewards, whose prints go to a log of the run."""
    printed = Printed(directory.logs, "rewards", progress.note)
    return Scorer(recipe.rewards, recipe.scoring, recipe.base_dir, printed)


@distributed.propagate_failures()
def train(
    ctx: TrainContext,
    directory: RunDirectory,
    progress: Progress,
    stop: GracefulStop,
    source: RolloutSource,
    evaluation: Evaluation | None = None,
) -> dict[str, Any]:
    """The loop over steps with its checkpoints, metrics and samples; then the final model and the summary."""
    load_more = partial(load_rest, ctx, source)
    state = (
        checkpoint.restore(directory.checkpoints, ctx.loaded, ctx.optimizer, ctx.critic, load_more)
        or checkpoint.State()
    )
    update_check.check_asked(state.step, ctx.steps)
    status.note_steps(directory, ctx.steps)
    explained = partial(explain_out_of_memory, ctx.recipe, ctx.loaded.model, ctx.longest, state, directory)
    saved_on_error = partial(save_on_error, ctx, state, directory, source, note=progress.note)
    with closing(Record(ctx, directory, progress, state)) as record:
        if state.step:
            progress.note(f"resumed after step {state.step}")
            each, last = ctx.updates_per_step, (state.last_metrics or {}).get("lr")
            planned = None if state.planned is None else state.planned * each
            if note := optim.changed_lr_note(ctx.recipe.optim, state.step * each, planned, ctx.steps * each, last):
                progress.note(note)
        else:
            with explained():
                check_before_first_step(ctx, stop)
        wait_for_engine(ctx, stop)
        state.planned = ctx.steps
        if asked := max(ctx.ranks.gather(stop.asked)):  # there is nothing to save yet
            where = str(directory.path)
            raise Interrupted(f"stopped before step {state.step + 1} of {ctx.steps}", where=where, number=asked)
        progress.ready(ctx.watchdog.seconds)
        peak_memory()  # that of an earlier stage in this process, and of loading, is no step's
        with explained(), saved_on_error():
            record.add_evaluation(state, *evaluate_step(evaluation, ctx, state, source, last=False))
        while not is_over(ctx, state):
            started = time.perf_counter()
            ctx.watchdog.begin_step(state.step)
            with saved_on_error():
                controllers, numbers, now = ctx.ranks.run(apply_controllers, ctx, state)
            with explained(), saved_on_error():
                if isinstance(ctx.reference, RenewedReference):
                    ctx.reference.begin_step(state.step)
                made = step(now, state, source)
            values = made.values | {f"control/{key}": number for key, number in numbers.items()}
            values = count_step(ctx, state, made, values, controllers, started)
            with explained(), saved_on_error():
                measured, samples = evaluate_step(evaluation, ctx, state, source, last=is_over(ctx, state))
            values |= measured
            record.samples.write(state.step, samples)
            asked = max(ctx.ranks.gather(stop.asked))
            given_up = update_check.check_patience(state, ctx.recipe.run.max_idle_steps)
            with record.add(state, values, made):
                last = bool(asked or given_up) or is_over(ctx, state)
                if last or is_save_due(ctx, state):
                    with saved_on_error():
                        source.finish(ctx, state)
                    record.settle(state)
                    save_step(ctx, state, directory, source, wait=last)
                    values |= state.count_save(ctx.ranks.broadcast(ctx.watchdog.seconds["save"]))
            del made  # its tensors are on the GPU
            if given_up:
                raise given_up
            if asked and not is_over(ctx, state):
                where = str(directory.path)
                raise Interrupted(f"stopped after step {state.step} of {ctx.steps}", where=where, number=asked)
        return save_final(ctx, state, directory, record) | (evaluation.summary(state) if evaluation else {})


def step(ctx: TrainContext, state: checkpoint.State, source: RolloutSource) -> StepResult:
    """One RL step; moves `state` past the prompts that its rollouts answer. What the recipe does not use is None in
    `ctx`, and skipped."""
    # Sync, prompts, rollouts, rewards: `collect` draws, samples and scores them, now or up to k steps ago.
    taken = source.next(ctx, state)
    values: dict[str, Any] = {}
    learned = None  # by a workflow or shape with a memory
    if ctx.shape is not None and ctx.shape.learn is not None:
        learned = learn_from(ctx.shape, state.memory, taken.rollouts, ctx.prompts, state.step)
        taken = replace(taken, rollouts=learned.rollouts)
        state.memory, values = learned.memory, {**learned.metrics}
        state.tokens += sum(row_lengths(learned.late))
    rollouts = taken.rollouts if ctx.replay is None else ctx.replay.inject(taken.rollouts, state.step)
    sequences = Sequences((), ()) if ctx.keeps_tokens_apart else sequences_of(rollouts)
    state.tokens += sum(row_lengths(taken.rollouts))
    if state.unfinished:
        state.tokens -= windows.count_older(taken.rollouts)
    if ctx.variants is not None:
        state.memory = learnt(ctx.variants, rollouts, state.memory)

    # Log-probs that filters and advantages read.
    scored = batch_of(ctx, rollouts, state).to(ctx.loaded.device)
    with ctx.watchdog.phase("measure"), ctx.compiled():
        if ctx.variants is not None or ctx.objective.needs & BESIDE:
            scored = measure_beside(ctx, scored, rollouts)
        scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), ctx.objective.needs_before_the_loss)
        if ctx.replay is not None:
            scored = replay.with_stored_logps(ctx, scored, sequences, rollouts)

    # Filter, then advantages of the rows that stay.
    batch = ctx.objective.compute_advantages(scored)
    state.memory = dict(batch.memory)
    values |= {**taken.metrics, "num_tokens": state.tokens}
    if ctx.objective.kl_in_reward:
        values |= ctx.objective.paid_kl_metrics(scored)
    if ctx.variants is not None:
        values |= variant_metrics(rollouts)
    if ctx.replay is None:
        values |= rollout_metrics(rollouts, batch)
    else:
        values |= rollout_metrics(taken.rollouts, replay.as_sampled(batch, rollouts, taken.rollouts)) | signal(batch)
        with ctx.watchdog.phase("measure"), ctx.compiled():
            rollouts, sequences, scored, batch = replay.add_rows(ctx, state, rollouts, sequences, scored, batch)
    if learned is not None and learned.again:
        with ctx.watchdog.phase("measure"), ctx.compiled():
            joined = replay.join_stored(ctx, state, learned.again, rollouts, sequences, scored, batch)
            rollouts, sequences, scored, batch = joined

    # Loss and update, minibatch by minibatch, of the rows that are this rank's.
    rows_of, own, mine = rows_of_step(ctx, batch, state.step), scored, batch
    if ctx.ranks.count > 1:
        rows_of, own, mine, sequences = own_batches(ctx, state, rollouts, rows_of.parts, scored, batch, sequences)
    with ctx.watchdog.phase("update"), ctx.compiled():
        before = None if state.updates else update_check.fingerprint(ctx.optimizer)
        metrics, measured, logp = update(ctx, mine, sequences, state.step, rows_of)
        if before is not None and not update_check.weights_moved(before, ctx.optimizer, ctx.ranks):
            metrics["updates"] = 0
        if ctx.replay is not None:
            values |= replay.train_apart(ctx, state, rollouts, batch)
            metrics["updates"] += values.get("replay/updates", 0)
        if ctx.sft_optimizer is not None:
            values |= unsolved.supervise(ctx, state, taken.rollouts)
            metrics["updates"] += values.get("sft/updates", 0)
    state.scaler = ctx.scaler.state_dict()
    if ctx.opponent is not None:
        ctx.opponent.follow(ctx.loaded.model)

    # What became of the prompts and of their tokens.
    total = ctx.ranks.total
    values |= thought_metrics([taken.rollouts[row] for row in rows_of.mine if row < len(taken.rollouts)], total)
    if ctx.sampler is not None:
        losses = None
        if "row_loss" in ctx.sampler.needs:
            losses = rows_of.everywhere(ctx.objective.row_losses(measured, logp))
        values |= update_sampler(ctx, ctx.sampler, state, taken.groups, scored, batch, losses)
    went = token_ledger(own, mine, ctx.objective.has_signal(mine), updated=bool(metrics["updates"]))
    went = total({**went, "seen": float(own.mask.sum())})
    seen = went.pop("seen")
    values |= sampled_metrics(own, ctx.recipe.rollout, metrics["trained_tokens"], ctx.recipe.batch.epochs, total)
    if ctx.recipe.rollout.staleness:
        values |= age_metrics(own, state.step, total)
        values |= drift_metrics(own, logp if measured.old_logp is None else measured.old_logp, state.step, total)
    if ctx.replay is not None:
        old_logp = saved_rollouts.of(own, measured, logp).batch.old_logp
        assert old_logp is not None
        values |= replay.store(ctx, state.step, rollouts, scored, rows_of.everywhere(old_logp), batch)
    if ctx.shape is not None:
        state.unfinished = windows.keep_unfinished(taken.rollouts)
        values |= windows.window_metrics(taken.rollouts)
    went["kept"] = 0 if learned is None else sum(len(rollout.sampled) for rollout in learned.late)
    went["replaced"] = taken.metrics.get("rollout/replaced_tokens", 0)
    own, measured = (one.replace(**dict.fromkeys(saved_rollouts.TOO_LARGE)) for one in (own, measured))
    return StepResult(rollouts, {**values, **metrics}, rows_of, own, measured, logp, went, seen)


def own_batches(
    ctx: TrainContext,
    state: checkpoint.State,
    rollouts: Sequence[Rollout],
    parts: Sequence[Sequence[int]],
    scored: RolloutBatch,
    batch: RolloutBatch,
    sequences: Sequences,
) -> tuple[OwnRows, RolloutBatch, RolloutBatch, Sequences]:
    """Which rows this of several ranks trains on, and its part of a step before and after advantages were assigned.
    Where only the ranks that have sampled have tokens, those of this rank's rows come here. parts: rows by update."""
    apart = ctx.keeps_tokens_apart
    sampled_by = ranks_of_tokens(ctx.ranks, rollouts) if apart else ()
    rows_of = deal_rows(ctx, batch, row_lengths(rollouts), parts, sampled_by)
    own, mine = rows_of.of(scored), rows_of.of(batch)
    if not apart:
        return rows_of, own, mine, rows_of.sequences(sequences)
    with ctx.watchdog.phase("gather"):
        here = rows_of.bring_tokens(rollouts)
    tokens = batch_of(ctx, here, state, own=True).to(ctx.loaded.device)
    return rows_of, with_tokens(own, tokens), with_tokens(mine, tokens), replace(sequences_of(here), own=True)


def update_sampler(
    ctx: TrainContext,
    sampler: StepSampler,
    state: checkpoint.State,
    groups: list[Group],
    scored: RolloutBatch,
    batch: RolloutBatch,
    losses: Tensor | None,
) -> dict[str, float]:
    """Say to the prompt sampler what became of the step's groups; returns its metrics. scored, batch: before and after
    advantages were assigned. losses [N]: `Objective.row_losses`, where it reads them."""
    outcomes = ctx.ranks.broadcast(with_outcomes(groups, scored, batch.keep, losses))
    state.sampler = sampler.update(state.sampler, outcomes, state.step)
    learnt = {} if ctx.values is None else ctx.values.learn(outcomes)
    return {**sampler.metrics(state.sampler, outcomes), **learnt}


def load_rest(ctx: TrainContext, source: RolloutSource, folder: Path, state: checkpoint.State) -> None:
    """Load what `checkpoint.restore` does not: copies of the weights, values of prompts, rollouts, loss scale."""
    if ctx.opponent is not None:
        ctx.opponent.load(folder)
    if ctx.proximal is not None:
        ctx.proximal.load(folder)
    if isinstance(ctx.reference, RenewedReference):
        ctx.reference.load(folder)
    if ctx.values is not None:
        ctx.values.load(folder)
    if ctx.replay is not None:
        ctx.replay.load(folder)
    unsolved.load(ctx.sft_optimizer, folder)
    source.load(folder, ctx, state)
    if state.scaler:
        ctx.scaler.load_state_dict(state.scaler)


def apply_controllers(
    ctx: TrainContext, state: checkpoint.State
) -> tuple[dict[str, Any], dict[str, float], TrainContext]:
    """The controllers' states and numbers for the step to come, from the metrics of the step before; and the context
    with these numbers."""
    if state.controllers is None or state.last_metrics is None:
        states = ctx.controls.start()
    else:
        states = ctx.controls.update(state.controllers, state.last_metrics, state.step - 1)
    numbers = ctx.controls.numbers(states, state.step)
    return states, numbers, ctx.at(numbers)


def check_before_first_step(ctx: TrainContext, stop: GracefulStop) -> None:
    """Before step 1: the model computes what it should, and on a GPU the longest rows have room beside the engine.

    An engine that is starting goes on meanwhile. When someone asks to stop it is not waited for.
    """
    check_start(ctx)
    if ctx.loaded.device.type == "cuda":
        with ctx.watchdog.phase("longest rows"):
            taken = probe_max_memory(ctx)
        wait_for_engine(ctx, stop)
        if not naps(ctx):
            check_room(taken)


def wait_for_engine(ctx: TrainContext, stop: GracefulStop) -> None:
    """Until the engine is there. One process gives up when someone asks to stop; several bring the weights to their
    engines together, and Ctrl-C comes to one of them."""
    with ctx.watchdog.phase("engine start"):
        wait_for(ctx.engine, lambda: bool(stop.asked) and ctx.ranks.count == 1)


def count_step(
    ctx: TrainContext,
    state: checkpoint.State,
    made: StepResult,
    values: dict[str, Any],
    controllers: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Move the counters past a step that had these controllers; returns its metrics with the times, those of rank 0 on
    all ranks, so that they decide alike."""
    ledger.add(state.ledger, "tokens", made.tokens)
    state.count_tokens(values["trained_tokens"] / ctx.recipe.batch.epochs, made.seen, values["updates"])
    phases = ctx.watchdog.times()
    values |= {**phases, **peak_memory()}
    values["time/step"] = time.perf_counter() - started
    values = ctx.ranks.broadcast(values)
    spent = {key.removeprefix("time/"): values[key] for key in phases}
    ledger.add(state.ledger, "seconds", {**spent, "other": max(0.0, values["time/step"] - sum(spent.values()))})
    state.controllers = controllers
    state.count_step(values["time/step"], values["updates"])
    state.first_metrics, state.last_metrics = state.first_metrics or values, values
    return values


def is_over(ctx: TrainContext, state: checkpoint.State) -> bool:
    """Whether the steps or the minutes of the run are used up, or its evaluations have stopped it."""
    return state.step >= ctx.steps or state.out_of_time(ctx.recipe.run.max_minutes) or bool(state.stopped_early)


def is_save_due(ctx: TrainContext, state: checkpoint.State) -> bool:
    """Whether the recipe asks for a checkpoint of this step."""
    every = ctx.recipe.run.save_every
    return every is not None and state.step % every == 0


def save_final(ctx: TrainContext, state: checkpoint.State, directory: RunDirectory, record: Record) -> dict[str, Any]:
    """Save the model that the run ends with; returns the summary. Raises NothingTrained if no step made an update."""
    update_check.check_end(state)
    started = time.perf_counter()
    with ctx.watchdog.phase("final save"):
        report = save_model(ctx.loaded, directory.final)
        if ctx.critic is not None and ctx.recipe.critic.path is None:
            distributed.run_on_rank0(save_head, ctx.critic, directory.final)
    return {
        "steps": state.step,
        "train_seconds": state.seconds,
        "save_seconds": state.save_seconds + state.own_save + time.perf_counter() - started,
        "reward_first": (state.first_metrics or {}).get("reward"),
        "reward_last": (state.last_metrics or {}).get("reward"),
        "num_tokens": state.tokens,
        "trainable_parameters": update_check.count_weights(ctx.loaded.model)[0],
        **update_check.summary(state),
        "ledger": ledger.ledger(
            state.ledger, {"eval": state.eval_seconds, "checkpoints": state.save_seconds + state.own_save}
        ),
        "model": str(directory.final),
        "save": report,
        **({"canaries": found} if (found := record.canaries.summary()) else {}),
    }
