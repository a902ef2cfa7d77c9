"""The held-out rows of a training run, and what is measured on them: made before the first step, closed in the end."""

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
    left_out,
    make_sync,
)
from posttrain.train.rollout_source import RolloutSource
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.load import check_columns, load_reward
from posttrain.verify.score import Scorer

Note = Callable[[str], None]  # says a line to people


def prepare_held_out(
    recipe: RlRecipe | SftRecipe | DpoRecipe, tokenizer: Any, offer: ToolSet | None = None
) -> Prepared[Prompt] | None:
    """The prompts of the recipe's evaluation; None where it generates nothing. Raises DataError for rows that cannot be
    read, RewardError for a reward that reads a column which they lack."""
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
    """How the completions of the evaluation are drawn: as rollouts are, but for what `eval` says itself."""
    settings = recipe.eval
    own = {"temperature": settings.temperature, "max_new_tokens": settings.max_new_tokens} if settings else {}
    return recipe.rollout.model_copy(update={key: value for key, value in own.items() if value is not None})


def eval_shape(recipe: RlRecipe, shape: Shape | None) -> Shape | None:
    """The shape of the evaluation's answers: that of the rollouts, if they come to one answer; None = completions."""
    section = recipe.rollout.shape
    if shape is None or section is None or recipe.eval is None:
        return None
    asked = recipe.eval.shaped
    return shape if (section.has_one_answer if asked is None else asked) else None


@contextmanager
def rl_evaluation(
    p: TrainContext, held_out: Prepared[Prompt] | None, directory: RunDirectory, note: Note
) -> Iterator[Evaluation | None]:
    """The evaluation of an rl run, by the engine that samples its rollouts; None where the recipe has none."""
    settings = p.recipe.eval
    if settings is None or held_out is None:
        yield None
        return
    if line := left_out(held_out):
        note(line)
    with ExitStack() as opened:
        scorer = p.scorer
        if settings.rewards:
            scorer = opened.enter_context(_scorer(p.recipe, settings, directory, note))
        engine: Any = p.engine
        sampling = rl_sampling(p.recipe)
        if p.recipe.rollout.engine == "stored":  # it samples nothing
            engine = TransformersEngine(p.loaded, batch_size=p.recipe.rollout.batch_size)
        sync, shape = make_sync(engine, p.loaded), eval_shape(p.recipe, p.shape)
        check_fits(held_out.items, sampling, (p.loaded.window or sys.maxsize) - (shape.room if shape else 0))
        engine = engine if shape is None else ShapedEngine(engine, shape)
        seed = p.recipe.run.seed
        completions = Completions(held_out.items, settings.n, sampling, seed, engine, sync, scorer)
        evaluation = Evaluation(settings, directory, p.loaded, [completions.measure])
        evaluation.attach(p.watchdog)
        yield evaluation


def evaluate_step(
    evaluation: Evaluation | None, p: TrainContext, state: State, source: RolloutSource, *, last: bool
) -> tuple[Values, list[Record]]:
    """Metrics and samples of the evaluation after a step of rl, if one is due. The engine is free then: rollouts of
    later steps that are in progress are waited for."""
    if evaluation is None or not evaluation.is_due(state, last=last):
        return {}, []
    source.finish(p, state)
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
    """The evaluation of a run on rows: validation losses, and completions where the recipe asks for them."""
    settings = recipe.eval
    if settings is None:
        yield None
        return
    with ExitStack() as opened:
        measures = list(losses)
        if held_out is not None:
            if line := left_out(held_out):
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
    """The rewards of the evaluation itself, whose prints go to a log of the run."""
    scoring = recipe.scoring if isinstance(recipe, RlRecipe) else Scoring()
    return Scorer(settings.rewards, scoring, recipe.base_dir, OutputLog(directory.logs, "evaluation", note))
