"""Reinforcement learning with verifier rewards. One step, top to bottom:

engine sync -> prompts -> rollouts -> scores -> keep -> advantages -> loss over minibatches -> optimizer.

The sync sends the weights of the previous step to the engine, which starts with the weights of the first step. An error
in the sync, or up to the first optimizer update, finds the previous step finished and loses nothing
(`emergency_checkpoint`).

With `rollout.staleness: k` a step trains on rollouts whose sampling began k steps earlier (`rollout_source`).

With several processes (`distributed`), each samples and scores a share of the prompts and trains on a share of the rows
(`own_rows`); in between, all processes know the rewards of the whole step. A single process skips all of this.

All randomness is derived from (seed, purpose, step): a resumed run samples what an uninterrupted run samples.
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
from posttrain.train.assemble import audit_rewards, build_context, prepare_run, start_engine_early
from posttrain.train.collate import Sequences, row_lengths, sequences_of, with_tokens
from posttrain.train.collect import SynchronousRollouts, batch_of
from posttrain.train.context import TrainContext
from posttrain.train.critic import save_head
from posttrain.train.emergency_checkpoint import save_on_error, save_step
from posttrain.train.evaluation import Evaluation
from posttrain.train.held_out import evaluate_step, rl_evaluation
from posttrain.train.library_logging import quiet
from posttrain.train.memory_plan import explain_out_of_memory, peak_memory
from posttrain.train.memory_probe import check_free_memory, engine_sleeps, probe_max_memory
from posttrain.train.model_folder import save_model
from posttrain.train.own_rows import OwnRows, assign_rows, ranks_of_tokens
from posttrain.train.pass_checks import check_start
from posttrain.train.policy import ON_OTHER_SEQUENCES, compute_logprobs, compute_on_other_sequences
from posttrain.train.prompt_sampler import StepSampler, with_outcomes
from posttrain.train.record import Record, StepResult
from posttrain.train.reference import RenewedReference, describe_reference
from posttrain.train.rl_metrics import (
    age_metrics,
    drift_metrics,
    rollout_metrics,
    sampled_metrics,
    signal_metrics,
    thought_metrics,
    token_ledger,
)
from posttrain.train.rollout_source import AsyncRollouts, RolloutSource
from posttrain.train.update import rows_of_step, update
from posttrain.train.variants import update_variant_memory, variant_metrics
from posttrain.train.workflow import learn_from
from posttrain.verify import correctness
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.score import Scorer

COLUMNS = (
    *("reward", "correct", "signal/share", "updates", "completions/mean_length", "completions/clipped_ratio"),
    *("grad_norm", "time/step"),
)


def run(recipe: RlRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train, save the final model and return the summary. Resumes from the newest complete checkpoint, if any."""
    quiet()
    work = prepare_run(recipe)
    with (
        Progress("rl", work.steps, COLUMNS, max_minutes=recipe.run.max_minutes) as progress,
        Scorer(
            recipe.rewards, recipe.scoring, recipe.base_dir, OutputLog(directory.logs, "rewards", progress.note)
        ) as scorer,
        Watchdog(directory.logs, recipe.run.hang_minutes) as watchdog,
        start_engine_early(recipe, directory, work) as starting_engine,
    ):
        if not correctness.can_judge(scorer.sections[scorer.correctness], scorer.rewards[scorer.correctness]):
            progress.columns = tuple(key for key in COLUMNS if key != "correct")
        audit_rewards(recipe, work, scorer, progress.note)
        with build_context(recipe, directory, work, scorer, watchdog, progress.note, starting_engine) as ctx:
            prompt_count = (len(ctx.prompts), recipe.rollout.prompts_per_step, "prompt", "rollout.prompts_per_step")
            for note in (
                merged_note(ctx.loaded),
                describe_reference(recipe, work.objective.needs, ctx.loaded.source),
                *start_notes.start_notes(recipe, ctx.loaded.model, work.steps * ctx.updates_per_step),
                start_notes.few_rows_note(*prompt_count),
                start_notes.shared_rows_note([prompt.row for prompt in work.prompts], work.held_out),
                *stale_notes(recipe),
                *band_notes(recipe),
                *work.sampler.notes(),
                checkpoints.no_checkpoint_note(recipe.run.save_every, work.steps),
            ):
                if note:
                    progress.note(note)
            # Until here there is nothing to save and Ctrl-C ends the run; from here GracefulStop handles it.
            evaluating = rl_evaluation(ctx, work.held_out, directory, progress.note)
            rollouts = AsyncRollouts(ctx) if recipe.rollout.staleness else SynchronousRollouts()
            with evaluating as evaluation, GracefulStop() as stop, closing(rollouts) as source:
                return train(ctx, directory, progress, stop, source, evaluation)


@distributed.propagate_failures()
def train(
    ctx: TrainContext,
    directory: RunDirectory,
    progress: Progress,
    stop: GracefulStop,
    source: RolloutSource,
    evaluation: Evaluation | None = None,
) -> dict[str, Any]:
    """Run the loop over steps with checkpoints, metrics and samples; save the final model and return the summary."""
    load_components = partial(load_step_components, ctx, source)
    state = (
        checkpoint.restore(directory.checkpoints, ctx.loaded, ctx.optimizer, ctx.critic, load_components)
        or checkpoint.State()
    )
    save_every = ctx.recipe.run.save_every
    checkpoints.check_steps_left(state.step, ctx.steps)
    status.note_steps(directory, ctx.steps)
    explained = partial(explain_out_of_memory, ctx.recipe, ctx.loaded.model, ctx.longest, state, directory)
    saved_on_error = partial(save_on_error, ctx, state, directory, source, note=progress.note)
    with closing(Record(ctx, directory, progress, state)) as record:
        if state.step:
            progress.note(f"resumed after step {state.step}")
            updates, last_lr = ctx.updates_per_step, (state.last_metrics or {}).get("lr")
            planned = None if state.planned is None else state.planned * updates
            if note := optim.changed_lr_note(
                ctx.recipe.optim, state.step * updates, planned, ctx.steps * updates, last_lr
            ):
                progress.note(note)
        else:
            with explained():
                check_before_first_step(ctx, stop)
        wait_for_engine(ctx, stop)
        state.planned = ctx.steps
        if signal_number := max(ctx.ranks.gather(stop.requested_signal)):  # nothing to save yet
            where = str(directory.path)
            raise Interrupted(f"stopped before step {state.step + 1} of {ctx.steps}", where=where, number=signal_number)
        progress.ready(ctx.watchdog.seconds)
        peak_memory()  # resets the peak: memory of an earlier stage in this process, or of loading, belongs to no step
        with explained(), saved_on_error():
            record.add_evaluation(state, *evaluate_step(evaluation, ctx, state, source, last=False))
        while not is_over(ctx, state):
            started = time.perf_counter()
            ctx.watchdog.begin_step(state.step)
            with saved_on_error():
                controllers, numbers, step_ctx = ctx.ranks.run(apply_controllers, ctx, state)
            with explained(), saved_on_error():
                if isinstance(ctx.reference, RenewedReference):
                    ctx.reference.begin_step(state.step)
                result = step(step_ctx, state, source)
            values = result.values | {f"control/{key}": number for key, number in numbers.items()}
            values = count_step(ctx, state, result, values, controllers, started)
            with explained(), saved_on_error():
                evaluated, samples = evaluate_step(evaluation, ctx, state, source, last=is_over(ctx, state))
            values |= evaluated
            record.samples.write(state.step, samples)
            signal_number = max(ctx.ranks.gather(stop.requested_signal))
            given_up = update_check.check_patience(state, ctx.recipe.run.max_idle_steps)
            with record.add(state, values, result):
                last = bool(signal_number or given_up) or is_over(ctx, state)
                if last or (save_every and state.step % save_every == 0):
                    with saved_on_error():
                        source.finish(ctx, state)
                    record.sync(state)
                    save_step(ctx, state, directory, source, wait=last)
                    values |= state.count_save(ctx.ranks.broadcast(ctx.watchdog.seconds["save"]))
            del result  # frees its GPU tensors before the next step
            if given_up:
                raise given_up
            if signal_number and not is_over(ctx, state):
                where = str(directory.path)
                raise Interrupted(f"stopped after step {state.step} of {ctx.steps}", where=where, number=signal_number)
        return save_final(ctx, state, directory, record) | (evaluation.summary(state) if evaluation else {})


def step(ctx: TrainContext, state: checkpoint.State, source: RolloutSource) -> StepResult:
    """Run one RL step and advance `state` past the prompts that its rollouts answer.

    Components that the recipe does not use are None in `ctx` and skipped.
    """
    # Sync, prompts, rollouts, rewards: `collect` selects, samples and scores them, now or up to k steps ago.
    collected = source.next(ctx, state)
    values: dict[str, Any] = {}
    learned = None  # result of a workflow or shape with a memory
    if ctx.shape is not None and ctx.shape.learn is not None:
        learned = learn_from(ctx.shape, state.memory, collected.rollouts, ctx.prompts, state.step)
        collected = replace(collected, rollouts=learned.rollouts)
        state.memory, values = learned.memory, {**learned.metrics}
        state.tokens += sum(row_lengths(learned.late))
    rollouts = collected.rollouts if ctx.replay is None else ctx.replay.inject(collected.rollouts, state.step)
    sequences = Sequences((), ()) if ctx.keeps_tokens_apart else sequences_of(rollouts)
    state.tokens += sum(row_lengths(collected.rollouts))
    if state.unfinished:
        state.tokens -= sum(len(r.prompt.ids) + r.older for r in collected.rollouts if r.older)  # counted before
    if ctx.variants is not None:
        state.memory = update_variant_memory(ctx.variants, rollouts, state.memory)

    # Compute the log-probs that filters and advantages read.
    scored = batch_of(ctx, rollouts, state).to(ctx.loaded.device)
    with ctx.watchdog.phase("measure"), ctx.compiled():
        if ctx.variants is not None or ctx.objective.needs & ON_OTHER_SEQUENCES:
            scored = compute_on_other_sequences(ctx, scored, rollouts)
        scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), ctx.objective.needs_before_the_loss)
        if ctx.replay is not None:
            scored = replay.with_stored_logps(ctx, scored, sequences, rollouts)

    # Filter groups, then compute advantages of the remaining rows.
    batch = ctx.objective.compute_advantages(scored)
    state.memory = dict(batch.memory)
    values |= {**collected.metrics, "num_tokens": state.tokens}
    if ctx.objective.kl_in_reward:
        values |= ctx.objective.reward_kl_metrics(scored)
    if ctx.variants is not None:
        values |= variant_metrics(rollouts)
    if ctx.replay is None:
        values |= rollout_metrics(rollouts, batch)
    else:
        sampled = replay.as_sampled(batch, rollouts, collected.rollouts)
        values |= rollout_metrics(collected.rollouts, sampled) | signal_metrics(batch)
        with ctx.watchdog.phase("measure"), ctx.compiled():
            rollouts, sequences, scored, batch = replay.add_rows(ctx, state, rollouts, sequences, scored, batch)
    if learned is not None and learned.again:
        with ctx.watchdog.phase("measure"), ctx.compiled():
            joined = replay.join_stored(ctx, state, learned.again, rollouts, sequences, scored, batch)
            rollouts, sequences, scored, batch = joined

    # Loss and optimizer updates, minibatch by minibatch, on the rows of this rank.
    rows_of, own_scored, own_batch = rows_of_step(ctx, batch, state.step), scored, batch
    if ctx.ranks.count > 1:
        rows_of, own_scored, own_batch, sequences = shard_batches(
            ctx, state, rollouts, rows_of.parts, scored, batch, sequences
        )
    with ctx.watchdog.phase("update"), ctx.compiled():
        before = None if state.updates else update_check.fingerprint(ctx.optimizer)
        metrics, measured, logp = update(ctx, own_batch, sequences, state.step, rows_of)
        if before is not None and not update_check.weights_moved(before, ctx.optimizer, ctx.ranks):
            metrics["updates"] = 0
        if ctx.replay is not None:
            values |= replay.train_apart(ctx, state, rollouts, batch)
            metrics["updates"] += values.get("replay/updates", 0)
        if ctx.sft_optimizer is not None:
            values |= unsolved.supervise(ctx, state, collected.rollouts)
            metrics["updates"] += values.get("sft/updates", 0)
    state.scaler = ctx.scaler.state_dict()
    if ctx.opponent is not None:
        ctx.opponent.follow(ctx.loaded.model)

    # Metrics and state updates after training: prompts, tokens, replay buffer.
    total = ctx.ranks.total
    own_rollouts = [collected.rollouts[row] for row in rows_of.mine if row < len(collected.rollouts)]
    values |= thought_metrics(own_rollouts, total)
    if ctx.sampler is not None:
        losses = None
        if "row_loss" in ctx.sampler.needs:
            losses = rows_of.gather_values(ctx.objective.row_losses(measured, logp))
        values |= update_sampler(ctx, ctx.sampler, state, collected.groups, scored, batch, losses)
    updated = bool(metrics["updates"])
    tokens = token_ledger(own_scored, own_batch, ctx.objective.has_signal(own_batch), updated=updated)
    tokens = total({**tokens, "seen": float(own_scored.mask.sum())})
    seen = tokens.pop("seen")
    values |= sampled_metrics(own_scored, ctx.recipe.rollout, metrics["trained_tokens"], ctx.recipe.batch.epochs, total)
    if ctx.recipe.rollout.staleness:
        start_logp = logp if measured.old_logp is None else measured.old_logp
        values |= age_metrics(own_scored, state.step, total)
        values |= drift_metrics(own_scored, start_logp, state.step, total)
    if ctx.replay is not None:
        old_logp = saved_rollouts.build_saved(own_scored, measured, logp).batch.old_logp
        assert old_logp is not None
        values |= replay.store(ctx, state.step, rollouts, scored, rows_of.gather_values(old_logp), batch)
    if ctx.shape is not None:
        state.unfinished = windows.keep_unfinished(collected.rollouts)
        values |= windows.window_metrics(collected.rollouts)
    tokens["kept"] = 0 if learned is None else sum(len(rollout.sampled_ids) for rollout in learned.late)
    tokens["replaced"] = collected.metrics.get("rollout/replaced_tokens", 0)
    own_scored, measured = (part.replace(**dict.fromkeys(saved_rollouts.TOO_LARGE)) for part in (own_scored, measured))
    return StepResult(rollouts, {**values, **metrics}, rows_of, own_scored, measured, logp, tokens, seen)


def shard_batches(
    ctx: TrainContext,
    state: checkpoint.State,
    rollouts: Sequence[Rollout],
    parts: Sequence[Sequence[int]],
    scored: RolloutBatch,
    batch: RolloutBatch,
    sequences: Sequences,
) -> tuple[OwnRows, RolloutBatch, RolloutBatch, Sequences]:
    """Assign the rows of a step to ranks; return this rank's rows with its shards of `scored`, `batch` and `sequences`.

    Where only the sampling ranks hold tokens, the tokens of this rank's rows are fetched from them. parts: row numbers
    of each update. scored, batch: the step before and after advantages were assigned.
    """
    sampled_by = ranks_of_tokens(ctx.ranks, rollouts) if ctx.keeps_tokens_apart else ()
    rows_of = assign_rows(ctx, batch, row_lengths(rollouts), parts, sampled_by)
    own_scored, own_batch = rows_of.select_batch(scored), rows_of.select_batch(batch)
    if not ctx.keeps_tokens_apart:
        return rows_of, own_scored, own_batch, rows_of.select_sequences(sequences)
    with ctx.watchdog.phase("gather"):
        own_rollouts = rows_of.receive_tokens(rollouts)
    tokens = batch_of(ctx, own_rollouts, state, own=True).to(ctx.loaded.device)
    own_sequences = replace(sequences_of(own_rollouts), own=True)
    return rows_of, with_tokens(own_scored, tokens), with_tokens(own_batch, tokens), own_sequences


def update_sampler(
    ctx: TrainContext,
    sampler: StepSampler,
    state: checkpoint.State,
    groups: list[Group],
    scored: RolloutBatch,
    batch: RolloutBatch,
    losses: Tensor | None,
) -> dict[str, float]:
    """Update the prompt sampler with the outcomes of the step's groups; return its metrics.

    scored, batch: the step before and after advantages were assigned. losses [N]: `Objective.row_losses`; None if the
    sampler does not read them.
    """
    outcomes = ctx.ranks.broadcast(with_outcomes(groups, scored, batch.keep, losses))
    state.sampler = sampler.update(state.sampler, outcomes, state.step)
    value_metrics = {} if ctx.values is None else ctx.values.learn(outcomes)
    return {**sampler.metrics(state.sampler, outcomes), **value_metrics}


def load_step_components(ctx: TrainContext, source: RolloutSource, folder: Path, state: checkpoint.State) -> None:
    """Load from a checkpoint what `checkpoint.restore` does not.

    These are weight copies, prompt values, stored rollouts, the SFT optimizer, and the loss scale.
    """
    for part in ctx.parts_with_state:
        part.load(folder)
    unsolved.load(ctx.sft_optimizer, folder)
    source.load(folder, ctx, state)
    if state.scaler:
        ctx.scaler.load_state_dict(state.scaler)


def apply_controllers(
    ctx: TrainContext, state: checkpoint.State
) -> tuple[dict[str, Any], dict[str, float], TrainContext]:
    """Compute the controllers' states and numbers for the coming step from the metrics of the step before.

    Returns the states, the numbers, and the context with these numbers applied.
    """
    if state.controllers is None or state.last_metrics is None:
        states = ctx.controls.start()
    else:
        states = ctx.controls.update(state.controllers, state.last_metrics, state.step - 1)
    numbers = ctx.controls.numbers(states, state.step)
    return states, numbers, ctx.at(numbers)


def check_before_first_step(ctx: TrainContext, stop: GracefulStop) -> None:
    """Check before step 1 that the model computes correctly and, on a GPU, that the longest rows fit beside the engine.

    An engine that is still starting continues meanwhile; it is not waited for once a stop was requested.
    """
    check_start(ctx)
    if ctx.loaded.device.type == "cuda":
        with ctx.watchdog.phase("longest rows"):
            used = probe_max_memory(ctx)
        wait_for_engine(ctx, stop)
        if not engine_sleeps(ctx):
            check_free_memory(used)


def wait_for_engine(ctx: TrainContext, stop: GracefulStop) -> None:
    """Wait until the engine is ready.

    A single process stops waiting when a stop is requested. Several ranks do not: they send the weights to their
    engines together, and Ctrl-C reaches only one of them.
    """
    with ctx.watchdog.phase("engine start"):
        wait_for(ctx.engine, lambda: bool(stop.requested_signal) and ctx.ranks.count == 1)


def count_step(
    ctx: TrainContext,
    state: checkpoint.State,
    result: StepResult,
    values: dict[str, Any],
    controllers: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Advance the counters of `state` past a finished step; return its metrics with times.

    Rank 0's metrics and times are broadcast to all ranks, so that all ranks take the same decisions. controllers: their
    states in this step.
    """
    ledger.add(state.ledger, "tokens", result.tokens)
    state.count_tokens(values["trained_tokens"] / ctx.recipe.batch.epochs, result.seen, values["updates"])
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
    """Return whether the run's steps or minutes are used up, or an evaluation has stopped it early."""
    return state.step >= ctx.steps or state.out_of_time(ctx.recipe.run.max_minutes) or bool(state.stopped_early)


def save_final(ctx: TrainContext, state: checkpoint.State, directory: RunDirectory, record: Record) -> dict[str, Any]:
    """Save the final model and return the summary. Raises NothingTrained if no step made an update."""
    update_check.check_end(state)
    started = time.perf_counter()
    with ctx.watchdog.phase("final save"):
        report = save_model(ctx.loaded, directory.final)
        if ctx.critic is not None and ctx.recipe.critic.path is None:
            distributed.run_on_rank0(save_head, ctx.critic, directory.final)
    checkpoint_seconds, final_save = state.save_seconds + state.own_save, time.perf_counter() - started
    return {
        "steps": state.step,
        "train_seconds": state.seconds,
        "save_seconds": checkpoint_seconds + final_save,
        "reward_first": (state.first_metrics or {}).get("reward"),
        "reward_last": (state.last_metrics or {}).get("reward"),
        "num_tokens": state.tokens,
        "trainable_parameters": update_check.count_weights(ctx.loaded.model)[0],
        **update_check.summary(state),
        "ledger": ledger.ledger(
            state.ledger,
            {"eval": state.eval_seconds, "checkpoints": checkpoint_seconds, "final_save": final_save},
        ),
        "model": str(directory.final),
        "save": report,
        **({"canaries": found} if (found := record.canaries.summary()) else {}),
    }
