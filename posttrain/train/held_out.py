"""Held-out evaluation of a training run: its prompts, engine and scorer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from posttrain.batch import Prompt
from posttrain.data.prepare import Prepared, prepare_prompts
from posttrain.evaluate.shaped import ShapedEngine
from posttrain.models.load import LoadedModel, load_image_reader
from posttrain.recipe.eval_sections import RlEval, RowsEval, held_out_data
from posttrain.recipe.reward_sections import Scoring
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.stages import DpoRecipe, RlRecipe, SftRecipe
from posttrain.rollout.continuation import Shape
from posttrain.rollout.engine import check_fits
from posttrain.rollout.hf import TransformersEngine
from posttrain.run.directory import RunDirectory
from posttrain.tools.tool_set import ToolSet
from posttrain.train import rank_consistency
from posttrain.train.checkpoint import State
from posttrain.train.context import TrainContext
from posttrain.train.evaluation import (
    Completions,
    Evaluation,
    Measure,
    Record,
    Values,
    describe_dropped_rows,
    make_sync,
)
from posttrain.train.rollout_source import RolloutSource
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.load import check_columns, load_reward
from posttrain.verify.score import Scorer

Note = Callable[[str], None]  # prints one line for the user


def prepare_held_out(
    recipe: RlRecipe | SftRecipe | DpoRecipe, tokenizer: Any, offer: ToolSet | None = None
) -> Prepared[Prompt] | None:
    """Prepare the prompts of the recipe's evaluation; None if it generates nothing.

    Raises DataError for rows that cannot be read, RewardError for a reward that reads a missing column.
    """
    settings = recipe.eval
    if settings is None or not settings.generates:
        return None
    data = held_out_data(recipe.data, settings.data)
    reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prepared = prepare_prompts(data, tokenizer, recipe.base_dir, offer.row if offer else None, reader)
    rank_consistency.check_rows([prompt.uid for prompt in prepared.items])
    sections = settings.rewards or (recipe.rewards if isinstance(recipe, RlRecipe) else [])
    rewards = [load_reward(section, recipe.base_dir) for section in sections]
    check_columns(rewards, {column for row in prepared.rows for column in row}, "eval.data")
    return prepared


def rl_sampling(recipe: RlRecipe) -> Sampling:
    """Return the sampling settings of evaluation completions: those of rollouts, overridden by `eval`."""
    settings = recipe.eval
    overrides = {"temperature": settings.temperature, "max_new_tokens": settings.max_new_tokens} if settings else {}
    return recipe.rollout.model_copy(update={key: value for key, value in overrides.items() if value is not None})


def eval_shape(recipe: RlRecipe, shape: Shape | None) -> Shape | None:
    """Return the shape of evaluation answers: the rollouts' shape if it has one answer; None = plain completions."""
    section = recipe.rollout.shape
    if shape is None or section is None or recipe.eval is None:
        return None
    shaped = recipe.eval.shaped
    return shape if (section.has_one_answer if shaped is None else shaped) else None


@contextmanager
def rl_evaluation(
    ctx: TrainContext, held_out: Prepared[Prompt] | None, directory: RunDirectory, note: Note
) -> Iterator[Evaluation | None]:
    """Build the evaluation of an rl run, which uses the engine that samples its rollouts; yield None without `eval`."""
    settings = ctx.recipe.eval
    if settings is None or held_out is None:
        yield None
        return
    if line := describe_dropped_rows(held_out):
        note(line)
    with ExitStack() as opened:
        scorer = ctx.scorer
        if settings.rewards:
            scorer = opened.enter_context(_scorer(ctx.recipe, settings, directory, note))
        engine: Any = ctx.engine
        sampling = rl_sampling(ctx.recipe)
        if ctx.recipe.rollout.engine == "stored":  # a stored engine cannot sample
            engine = TransformersEngine(ctx.loaded, batch_size=ctx.recipe.rollout.batch_size)
        sync, shape = make_sync(engine, ctx.loaded), eval_shape(ctx.recipe, ctx.shape)
        check_fits(held_out.items, sampling, (ctx.loaded.window or sys.maxsize) - (shape.room if shape else 0))
        engine = engine if shape is None else ShapedEngine(engine, shape)
        seed = ctx.recipe.run.seed
        completions = Completions(held_out.items, settings.n, sampling, seed, engine, sync, scorer)
        evaluation = Evaluation(settings, directory, ctx.loaded, [completions.measure])
        evaluation.attach(ctx.watchdog)
        yield evaluation


def evaluate_step(
    evaluation: Evaluation | None, ctx: TrainContext, state: State, source: RolloutSource, *, last: bool
) -> tuple[Values, list[Record]]:
    """Return metrics and samples of the evaluation after an rl step; empty if none is due.

    Waits until rollouts in progress for later steps have finished, so that the engine is free.
    """
    if evaluation is None or not evaluation.is_due(state, last=last):
        return {}, []
    source.finish(ctx, state)
    return evaluation.evaluate(state)


@contextmanager
def rows_evaluation(
    recipe: SftRecipe | DpoRecipe,
    directory: RunDirectory,
    loaded: LoadedModel,
    held_out: Prepared[Prompt] | None,
    losses: Sequence[Measure],
    note: Note,
) -> Iterator[Evaluation | None]:
    """Build the evaluation of an sft or dpo run: validation losses, and completions if the recipe asks for them."""
    settings = recipe.eval
    if settings is None:
        yield None
        return
    with ExitStack() as opened:
        measures = list(losses)
        if held_out is not None:
            if line := describe_dropped_rows(held_out):
                note(line)
            sampling = Sampling(temperature=settings.temperature, max_new_tokens=settings.max_new_tokens)
            check_fits(held_out.items, sampling, loaded.window or sys.maxsize)
            scorer = opened.enter_context(_scorer(recipe, settings, directory, note))
            engine = TransformersEngine(loaded, batch_size=settings.batch_size)
            sync, seed = make_sync(engine, loaded), recipe.run.seed
            completions = Completions(held_out.items, settings.n, sampling, seed, engine, sync, scorer)
            measures.append(completions.measure)
        yield Evaluation(settings, directory, loaded, measures)


def _scorer(
    recipe: RlRecipe | SftRecipe | DpoRecipe, settings: RlEval | RowsEval, directory: RunDirectory, note: Note
) -> Scorer:
    """Build the scorer of the evaluation's own rewards; their output goes to a log of the run."""
    scoring = recipe.scoring if isinstance(recipe, RlRecipe) else Scoring()
    return Scorer(settings.rewards, scoring, recipe.base_dir, OutputLog(directory.logs, "evaluation", note))
