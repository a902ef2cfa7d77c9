"""Reinforcement learning with verifier rewards. One step, top to bottom:

engine sync -> prompts -> rollouts -> scores -> keep -> advantages -> loss over minibatches -> optimiser.

The sync brings the weights of the step before; the engine starts with those of the first. An error in it, or up to the
advantages, finds that step finished and loses nothing (`salvage`).

With `rollout.staleness: 1` prompts and rollouts are those of the next step, and run while this one trains (`overlap`).

With several processes (`distributed`), each samples and scores a share of the prompts and trains on a share of the
rows; between the two, all of them hold the rollouts of the whole step.

All randomness is derived from (seed, purpose, step): a resumed run draws what an unbroken run draws.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.batch import Rollout
from posttrain.data.prepare import prepare_prompts
from posttrain.data.sampler import PromptSampler
from posttrain.errors import Interrupted
from posttrain.models import load as models
from posttrain.models.save import save
from posttrain.recipe.checks import reward_name
from posttrain.recipe.objective_checks import BY_REFERENCE, stale_notes
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout import turns
from posttrain.rollout.engine import check_engine, check_fits, make_engine, needed_length, start_note
from posttrain.rollout.stored import StoredEngine
from posttrain.run import checkpoints
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.metrics import read_metrics
from posttrain.run.progress import Progress
from posttrain.run.watchdog import Watchdog
from posttrain.tools.offer import offer_of
from posttrain.train import checkpoint, compiled, distributed, optim, saved_rollouts, sharding
from posttrain.train.attention import use_packed_attention
from posttrain.train.canary import Canaries
from posttrain.train.collate import sequences_of
from posttrain.train.collect import batch_of, collect
from posttrain.train.controls import Controls
from posttrain.train.critic import frozen_head, save_head, value_head
from posttrain.train.fit import try_longest
from posttrain.train.objective import Objective
from posttrain.train.offline import stored_completions
from posttrain.train.opponent import Opponent
from posttrain.train.overlap import Ahead
from posttrain.train.peak import peak_memory
from posttrain.train.pieces import Pieces
from posttrain.train.plan import explained_out_of_memory
from posttrain.train.policy import measure
from posttrain.train.quiet import quiet
from posttrain.train.reference import ReferencePolicy, reference_of
from posttrain.train.rehearsal import rehearse
from posttrain.train.rl_metrics import age_metrics, rollout_metrics, sample_records, signal_note
from posttrain.train.salvage import salvaged
from posttrain.train.scoring import check_turns
from posttrain.train.start import check_start
from posttrain.train.update import update
from posttrain.verify.audit import audit_gold
from posttrain.verify.score import Scorer

PADDED = "rows are padded: the attention of this model, as it is, cannot keep them apart in one line"
COLUMNS = ("reward", "correct", "signal/share", "completions/mean_length", "grad_norm", "time/step")


def run(recipe: RlRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train, save the final model, return the summary. Resumes from the newest complete checkpoint, if any."""
    quiet()
    optim.check(recipe.optim, models.device_of(recipe.model))
    compiled.check(recipe.model, models.device_of(recipe.model))
    sharding.check(recipe.model)
    check_engine(
        recipe.rollout,
        lambda: models.config_of(recipe.model, recipe.base_dir),
        recipe.model.lora.rank if recipe.model.lora else None,
    )
    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    offer = offer_of(recipe, tokenizer, recipe.base_dir)
    turns.check_start(offer, tokenizer)
    prepared = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, offer.row if offer else None)
    distributed.check_rows([prompt.uid for prompt in prepared.items])
    steps = total_steps(recipe, len(prepared.items))
    objective = Objective.from_recipe(recipe)
    controls = Controls.from_recipe(recipe, steps)
    rehearse(objective, recipe, prepared.items)
    stored = None
    if recipe.rollout.engine == "stored":
        stored = stored_completions(prepared.items, tokenizer, recipe.data, recipe.rollout.max_new_tokens)
    with (
        Progress("rl", steps, COLUMNS, max_minutes=recipe.run.max_minutes) as progress,
        Scorer(recipe.rewards, recipe.scoring, recipe.base_dir) as scorer,
        Watchdog(directory.logs, recipe.run.hang_minutes) as watchdog,
    ):
        if note := check_turns(recipe, scorer, objective.needs):
            progress.note(note)
        if distributed.is_main():
            progress.note(audit_gold(scorer, [p.row for p in prepared.items]).summary)
        loaded = sharding.load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
        distributed.same_weights(loaded.model)
        critic = value_head(loaded) if objective.needs & {"values", "new_values"} else None
        if recipe.critic.path is not None:
            critic = frozen_head(loaded, recipe.critic.path, recipe.base_dir)
        learner = None if recipe.critic.path is not None else critic
        sampling = turns.with_room(recipe.rollout) if offer else recipe.rollout
        check_fits(prepared.items, sampling, model_window(loaded))
        max_len = needed_length(prepared.items, sampling)
        if note := start_note(recipe.rollout):
            progress.note(note)
        with watchdog.phase("engine start"):
            scratch = distributed.own(directory.path / "engine")
            inner = (
                StoredEngine(loaded, stored)
                if stored is not None
                else make_engine(recipe.rollout, _sampled(loaded, recipe), scratch=scratch, max_len=max_len)
            )
            engine = turns.turning(inner, offer, loaded)
            if route := getattr(inner, "route", ""):
                progress.note(route)
        try:
            sampler = PromptSampler(
                len(prepared.items), recipe.rollout.prompts_per_step, recipe.run.seed, recipe.data.shuffle
            )
            longest = max(len(prompt.ids) for prompt in prepared.items)
            with explained_out_of_memory(recipe, loaded.model, longest, checkpoint.State(), directory):
                on_gpu = loaded.device.type == "cuda"
                packed = on_gpu and use_packed_attention(loaded.model)  # and so is its copy
                if on_gpu and not packed:
                    progress.note(PADDED)
                pieces = Pieces(
                    recipe=recipe,
                    loaded=loaded,
                    engine=engine,
                    scorer=scorer,
                    sampler=sampler,
                    prompts=prepared.items,
                    objective=objective,
                    controls=controls,
                    optimizer=optim.build(loaded.model, recipe.optim, learner, recipe.critic.lr),
                    scaler=optim.loss_scaler(loaded),
                    steps=steps,
                    reference=_reference(loaded, recipe, objective),
                    critic=critic,
                    opponent=Opponent(loaded.model, recipe.opponent.ema) if recipe.opponent else None,
                    packed=packed,
                    watchdog=watchdog,
                    dump=directory.path / "failed",
                    compiled=compiled.compiled(loaded.model, recipe.model),
                )
            if recipe.rollout.staleness == 0:
                with GracefulStop() as stop:  # until here there is nothing to finish, and Ctrl-C ends the run at once
                    return train(pieces, directory, steps, progress, stop)
            for note in stale_notes(recipe):
                progress.note(note)
            with GracefulStop() as stop, Ahead(collect, engine) as ahead:
                return train(pieces, directory, steps, progress, stop, ahead)
        finally:
            engine.close()


def _sampled(loaded: models.LoadedModel, recipe: RlRecipe) -> models.LoadedModel:
    """What the engine is made from. transformers samples with the model itself, which a divided one cannot do."""
    if loaded.is_sharded and recipe.rollout.engine == "transformers":
        return models.load(recipe.model, recipe.base_dir, seed=recipe.run.seed, training=True)
    return loaded


def _reference(loaded: models.LoadedModel, recipe: RlRecipe, objective: Objective) -> ReferencePolicy | None:
    needed = objective.needs & set(BY_REFERENCE) or recipe.critic.path is not None
    return reference_of(recipe, loaded) if needed else None


def train(
    p: Pieces,
    directory: RunDirectory,
    steps: int,
    progress: Progress,
    stop: GracefulStop,
    ahead: Ahead | None = None,
) -> dict[str, Any]:
    """The loop over steps with its checkpoints, metrics and samples."""
    settings = p.recipe.run
    state = checkpoint.restore(directory.checkpoints, p.loaded, p.optimizer, p.critic) or checkpoint.State()
    metrics, samples = directory.metrics(resume_after=state.step), directory.samples(resume_after=state.step)
    saved_rollouts.cut(directory.path, state.step)
    longest = max(len(prompt.ids) for prompt in p.prompts)
    explained = partial(explained_out_of_memory, p.recipe, p.loaded.model, longest, state, directory)
    drawing = partial(salvaged, p, state, directory, ahead, note=progress.note)
    if state.step:
        _go_on(p, state, checkpoints.folder_for(directory.checkpoints, state.step), ahead)
        progress.note(f"resumed after step {state.step}")
    else:
        with explained():
            check_start(p)
            if p.loaded.device.type == "cuda":
                with p.watchdog.phase("longest rows"):
                    try_longest(p)
    if state.controllers is None:
        state.controllers = p.controls.start()
    canaries = canaries_of(p.recipe, directory, state.step)
    if distributed.any_rank(stop.requested):  # there is nothing to save yet
        raise Interrupted(f"stopped before step {state.step + 1} of {steps}", where=str(directory.path))
    progress.ready(p.watchdog.seconds)
    while state.step < steps and not _out_of_time(settings.max_minutes, state.seconds):
        started = time.perf_counter()
        p.watchdog.begin_step(state.step)
        numbers = p.controls.numbers(state.controllers, state.step)
        with explained():
            rollouts, values, saved = step(p.at(numbers), state, ahead, drawing())
        values |= {f"control/{key}": number for key, number in numbers.items()}
        values |= {**p.watchdog.times(), **peak_memory()}
        values["time/step"] = time.perf_counter() - started
        values = distributed.from_main(values)  # all ranks decide by the same clock and the same numbers
        state.controllers = p.controls.update(state.controllers, values, state.step)
        state.step += 1
        sung, alarms = canaries.add(state.step, values)
        values |= sung
        state.seconds += values["time/step"]
        state.first_metrics, state.last_metrics = state.first_metrics or values, values
        metrics.write(state.step, values)
        saved_rollouts.write(directory.path, state.step, saved, keep=settings.keep_rollouts)
        samples.write(state.step, sample_records(rollouts, settings.samples_per_step))
        progress.update(state.step, values, spent=state.seconds)
        if any(r.weight for r in p.recipe.rewards) and (warning := signal_note(values)):
            progress.note(warning)
        for alarm in alarms:
            progress.note(alarm)
        ends = state.step == steps or _out_of_time(settings.max_minutes, state.seconds)
        due = settings.save_every is not None and state.step % settings.save_every == 0
        stopping = distributed.any_rank(stop.requested)
        if due or ends or stopping:
            if ahead is not None:
                with drawing():
                    ahead.finish(p, state)
            with p.watchdog.phase("save"):
                checkpoint.save(
                    directory.checkpoints,
                    state,
                    p.loaded,
                    p.optimizer,
                    settings.keep_checkpoints,
                    p.critic,
                    *([ahead.write] if ahead is not None else [p.opponent.save] if p.opponent is not None else []),
                )
        if stopping and not ends:
            raise Interrupted(f"stopped after step {state.step} of {steps}", where=str(directory.path))
    with p.watchdog.phase("final save"):
        report = distributed.on_main(save, sharding.whole(p.loaded), directory.final)
        if p.critic is not None and p.recipe.critic.path is None:
            distributed.on_main(save_head, p.critic, directory.final)
    return {
        "steps": state.step,
        "train_seconds": state.seconds,
        "reward_first": (state.first_metrics or {}).get("reward"),
        "reward_last": (state.last_metrics or {}).get("reward"),
        "num_tokens": state.tokens,
        "model": str(directory.final),
        "save": report,
        **({"canaries": found} if (found := canaries.summary()) else {}),
    }


def _go_on(p: Pieces, state: checkpoint.State, folder: Path, ahead: Ahead | None) -> None:
    """What `checkpoint.restore` leaves to be brought to the checkpoint's step: everything but model and optimiser."""
    p.engine.sync(p.loaded.model, state.step)
    if p.opponent is not None:
        p.opponent.load(folder)
    if ahead is not None:
        ahead.read(folder, p.prompts)
    if state.scaler:
        p.scaler.load_state_dict(state.scaler)


def canaries_of(recipe: RlRecipe, directory: RunDirectory, done: int) -> Canaries:
    """The canaries of the recipe; those of a resumed run have seen its `done` steps."""
    names = [reward_name(reward) for reward in recipe.rewards if reward.canary]
    earlier = read_metrics(directory.path) if names and done else []
    return Canaries(names, recipe.scoring.canary_window, earlier)


def step(
    p: Pieces, state: checkpoint.State, ahead: Ahead | None, drawing: AbstractContextManager[None]
) -> tuple[list[Rollout], dict[str, Any], saved_rollouts.Saved]:
    """One RL step, on its own rollouts or on those drawn ahead. Returns the scored rollouts, the step's metrics, and
    what `whatif` needs of the rollouts; moves `state` past the prompts that it drew. drawing: around what comes before
    any weight changes."""
    with drawing:
        if ahead is None:
            p.sync(state.step)
        rollouts, gathered = collect(p, state) if ahead is None else ahead.take(p, state)
    if ahead is None:
        p.engine.sleep()  # with vllm.sleep its memory is the trainer's until the next sync
    sequences = sequences_of(rollouts)
    state.tokens += sum(sequences.lengths)
    scored = batch_of(p, rollouts, state).to(p.loaded.device)
    with p.watchdog.phase("measure"), p.compiled():
        scored = measure(p, scored, sequences, range(len(scored)), p.objective.needs_before_the_loss)
    batch = p.objective.assign(scored)
    state.memory = dict(batch.memory)
    values = {**gathered, **rollout_metrics(rollouts, batch.to("cpu")), "num_tokens": state.tokens}

    with p.watchdog.phase("update"), p.compiled():
        metrics, measured, logp = update(p, batch, sequences, state.step)
    state.scaler = p.scaler.state_dict()
    if p.opponent is not None:
        p.opponent.follow(p.loaded.model)
    if ahead is not None:
        values |= age_metrics(scored, state.step)
    return rollouts, {**values, **metrics}, saved_rollouts.of(scored, measured, logp)


def total_steps(recipe: RlRecipe, prompts: int) -> int:
    """run.steps, or run.epochs passes over the prompts, or one pass."""
    if recipe.run.steps:
        return recipe.run.steps
    return max(1, (recipe.run.epochs or 1) * prompts // recipe.rollout.prompts_per_step)


def model_window(loaded: models.LoadedModel) -> int:
    """The longest sequence that the model was made for, in tokens."""
    return getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _out_of_time(max_minutes: float | None, seconds: float) -> bool:
    return max_minutes is not None and seconds >= 60 * max_minutes
