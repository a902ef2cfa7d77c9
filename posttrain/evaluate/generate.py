"""The generate stage: samples completions of prompts to completions.jsonl; the prompts' rows go to problems.jsonl.

With `best_of` completions are scored, and the best completion of each prompt is also in best.jsonl. With `search` each
prompt has one completion, found step by step. With `tree` each record has the tree whose best path is its completion.
With `workflow` each record has the calls by role, the last of which is its completion.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError
from posttrain.evaluate.best_of import WEIGHTED_SUM, best_of, make_best_of_table, pick_best_records
from posttrain.evaluate.compare import PROBLEMS
from posttrain.evaluate.run import grade
from posttrain.evaluate.sampling import (
    COMPLETIONS,
    EngineWrapper,
    Grade,
    Record,
    open_print_log,
    prepare,
    prompt_rows,
    sample,
)
from posttrain.evaluate.search import EvidenceReader, SearchEngine
from posttrain.evaluate.shaped import GradeAll, TreeEngine, load_shape
from posttrain.evaluate.workflow import WorkflowEngine, bind_workflow
from posttrain.models.load import LoadedModel, load_image_reader, load_tokenizer
from posttrain.recipe.eval_sections import GrowTree, Search
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.rollout_sections import PlayWorkflow
from posttrain.recipe.stages import GenerateRecipe
from posttrain.rollout.continuation import rehearse_shape
from posttrain.rollout.engine import Engine
from posttrain.run.atomic_io import write_text
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import to_lines
from posttrain.tools.load import load_environment
from posttrain.verify.load import check_columns
from posttrain.verify.score import Scorer

BEST_FILE = "best.jsonl"
OpenGrader = Callable[..., GradeAll]  # (rewards, their settings, limits of failures) -> grades of rollouts


def run(recipe: GenerateRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Sample completions, write completions.jsonl (one object per completion) and return counts."""
    prepared = prepare(recipe)
    with contextlib.ExitStack() as open_scorer:
        columns = {column for row in prepared.rows for column in row}
        log = open_print_log(directory, "rewards")

        def open_grader(rewards: list[Reward], scoring: Scoring, **limits: Any) -> GradeAll:
            """Start the rewards; the returned function grades rollouts with them."""
            scorer = open_scorer.enter_context(Scorer(rewards, scoring, recipe.base_dir, log))
            check_columns(scorer.rewards, columns)
            failures = scorer.failures(**limits)
            return lambda rollouts: grade(scorer, rollouts, failures)

        scored = _make_grader(recipe, open_grader, len(prepared.items))
        around = _make_search(recipe, open_grader, columns)
        room = 0
        if recipe.tree is not None:
            scored, around, room = _make_trees(recipe, recipe.tree, open_grader)
        if recipe.workflow is not None:
            scored, around, room = _make_workflow(recipe, recipe.workflow, prepared.items)
        records = sample(recipe, directory, prepared.items, recipe.samples, scored, around=around, room=room)
    rows = prompt_rows(prepared, recipe.data)
    write_text(directory.path / PROBLEMS, to_lines(rows))
    return {
        "model": recipe.model.path,
        "prompts": len(prepared.items),
        "samples": recipe.samples,
        "mean_tokens": sum(r["tokens"] for r in records) / len(records),
        "truncated": sum(r["finish"] == "length" for r in records) / len(records),
        "dropped": {cause: len(uids) for cause, uids in prepared.dropped.items()},
        "sampling": recipe.sampling.model_dump(),
        "seed": recipe.run.seed,
        "completions": str(directory.path / COMPLETIONS),
        **(_write_best(recipe, directory, records) if recipe.best_of else {}),
    }


def _make_grader(recipe: GenerateRecipe, open_grader: OpenGrader, prompts: int) -> Grade:
    """Return the function that adds scores to each record, or nothing without `best_of`."""
    if recipe.best_of is None:
        return lambda rollouts: [{"search": r.scores} if r.scores else {} for r in rollouts]
    grade_all = open_grader(recipe.best_of.rewards, recipe.best_of.scoring, enough=prompts, unit="chunk")
    return lambda rollouts: [{key: grade[key] for key in ("scores", "reward")} for grade in grade_all(rollouts)]


def _make_search(recipe: GenerateRecipe, open_grader: OpenGrader, columns: set[str]) -> EngineWrapper | None:
    """Return the wrapper that runs the search with its judge around the engine; None without `search`."""
    settings = recipe.search
    if settings is None:
        return None
    grade_all = open_grader(settings.rewards, settings.scoring, unit="round")
    reader = _make_reader(recipe, settings, open_grader, columns)

    def judge(traces: Sequence[Rollout]) -> list[float]:
        shown = traces if reader is None else reader.inform(traces)
        rewards = [grade["reward"] for grade in grade_all(shown)]
        return [0.0 if r is None else sigmoid(r) if settings.sigmoid else r for r in rewards]

    return lambda engine, loaded: SearchEngine(
        engine, settings, judge, loaded.tokenizer, loaded.eos_ids, recipe.sampling
    )


def _make_reader(
    recipe: GenerateRecipe, settings: Search, open_grader: OpenGrader, columns: set[str]
) -> EvidenceReader | None:
    """Return the reader that adds evidence to the judge's question; None without `search.evidence`.

    Its rewards, if any, decide which traces need evidence. Raises DataError for a column that no row has.
    """
    section = settings.evidence
    if section is None:
        return None
    if section.column is not None and section.column not in columns:
        raise DataError(
            f"search.evidence.column: no row has a column `{section.column}`", allowed=", ".join(sorted(columns))
        )
    if not section.rewards:
        return EvidenceReader.from_section(section, settings.ends, recipe.base_dir)
    grade_all = open_grader(section.rewards, settings.scoring, unit="round")

    def ask(traces: Sequence[Rollout]) -> list[float]:
        return [grade["reward"] or 0.0 for grade in grade_all(traces)]

    return EvidenceReader.from_section(section, settings.ends, recipe.base_dir, ask)


def _make_trees(
    recipe: GenerateRecipe, settings: GrowTree, open_grader: OpenGrader
) -> tuple[Grade, EngineWrapper, int]:
    """Return what describes the trees, the wrapper of the engine that grows them, and the extra tokens.

    The extra tokens are those by which a tree may exceed max_new_tokens.
    """
    grade_all = open_grader(settings.rewards, settings.scoring, unit="round")
    tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
    world = None if recipe.environment is None else load_environment(recipe.environment, recipe.base_dir)
    shape = load_shape(settings.shape, tokenizer, recipe.base_dir, world)
    engines: list[TreeEngine] = []

    def around(engine: Engine, _: LoadedModel) -> TreeEngine:
        engines.append(TreeEngine(engine, shape, grade_all))
        return engines[-1]

    return lambda rollouts: engines[-1].describe(rollouts), around, shape.room


def _make_workflow(
    recipe: GenerateRecipe, section: PlayWorkflow, prompts: Sequence[Prompt]
) -> tuple[Grade, EngineWrapper, int]:
    """Return what describes workflow rollouts, the wrapper of the engine that runs them, and the extra tokens.

    The extra tokens are those by which a call may exceed its prompt and max_new_tokens. Runs the workflow once on
    made-up tokens and raises its errors.
    """
    tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
    reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    new_tokens = recipe.sampling.max_new_tokens
    context = (recipe.data, tokenizer, prompts, new_tokens, recipe.base_dir)
    shape = bind_workflow(section, *context, key="workflow", reader=reader)
    rehearse_shape(shape, prompts[0], recipe.sampling)
    engines: list[WorkflowEngine] = []

    def around(engine: Engine, _: LoadedModel) -> WorkflowEngine:
        engines.append(WorkflowEngine(engine, shape))
        return engines[-1]

    return lambda rollouts: engines[-1].describe(rollouts), around, shape.room


def sigmoid(score: float) -> float:
    """Compute 1 / (1 + exp(-score)), without overflow."""
    return 0.5 * (1 + math.tanh(score / 2))


def _write_best(recipe: GenerateRecipe, directory: RunDirectory, records: Sequence[Record]) -> dict[str, Any]:
    """Write best.jsonl and return its keys of the summary."""
    picked = pick_best_records(records)
    write_text(directory.path / BEST_FILE, to_lines([{k: v for k, v in r.items() if k != "step"} for r in picked]))
    rows = best_of(records, WEIGHTED_SUM, seed=recipe.run.seed)
    return {
        "best": str(directory.path / BEST_FILE),
        "prompts_without_a_score": len({r["problem"] for r in records}) - len(picked),
        "best_of": {"by": WEIGHTED_SUM, "rows": rows},
        "tables": [make_best_of_table(rows, WEIGHTED_SUM)],
    }
