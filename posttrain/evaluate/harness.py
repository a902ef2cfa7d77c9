"""The harness stage: runs tasks of lm-eval on a model loaded by posttrain, with bootstrap intervals.

lm-eval provides the tasks: prompts, few-shot examples, answer extraction and grading. Its means over problems get the
interval of `posttrain eval`; a number that is not a mean over problems gets lm-eval's own standard error.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import numpy as np

from posttrain import hub, terminal
from posttrain.errors import DataError, MissingExtra, UserError, count_noun, did_you_mean
from posttrain.evaluate.compare import PROBLEMS
from posttrain.evaluate.estimators import Interval, bootstrap_ci
from posttrain.evaluate.run import result_table
from posttrain.evaluate.sampling import COMPLETIONS
from posttrain.models.load import config_of, load
from posttrain.path_resolution import find
from posttrain.recipe.stages import HarnessRecipe
from posttrain.rollout.make_engine import check_engine
from posttrain.run.atomic_io import write_text
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import to_lines

SEEDS = (0, 1234)  # of Python's and numpy's generators in lm-eval's command line, set before it reads tasks
FEWSHOT_SEED = 1234  # of the few-shot examples in lm-eval's command line
STDERR_ITERATIONS = 1000
MEAN_TOLERANCE = 1e-9  # between lm-eval's number and the mean of its values by problem
NO_FILTER = "none"  # lm-eval's name for the filter of a task without one

Values = Mapping[tuple[str, str], Mapping[int, float]]  # (metric, filter) -> value of each problem


def run(recipe: HarnessRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Run the tasks on the model and return the summary. Tasks and their data are read before the model.

    completions.jsonl holds every answer with its grades, problems.jsonl one row per problem. Raises UserError for a
    task that does not exist, or that runs programs; DataError if its data cannot be read.
    """
    started = time.perf_counter()
    check_engine(recipe.engine, lambda: config_of(recipe.model, recipe.base_dir), base_dir=recipe.base_dir)
    lm_eval = import_lm_eval()
    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    tasks = load_tasks(recipe)
    for name, task in tasks["tasks"].items():
        _configure_task(name, task, recipe)
    loaded = load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
    chat = bool(loaded.tokenizer.chat_template) if recipe.chat is None else recipe.chat
    if chat and not loaded.tokenizer.chat_template:
        raise UserError("chat: true, but the model has no chat template", hint="give model.chat_template, or remove it")
    from posttrain.evaluate.harness_model import HarnessModel

    model = HarnessModel(loaded, recipe, chat=chat, scratch=directory.path / "engine")
    results = lm_eval.evaluator.evaluate(
        lm=model,
        task_dict=tasks,
        limit=recipe.limit,
        bootstrap_iters=STDERR_ITERATIONS,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    intervals = dict(iterate_metrics(results, recipe))
    _write_results(directory, results, recipe.run.samples_per_step)
    cut = sum(rollout.finish == "length" for rollout in model.answers)
    summary = {
        "model": recipe.model.path,
        "intervals": {name: asdict(interval) for name, interval in intervals.items()},
        "problems": sum(count["effective"] for count in results["n-samples"].values()),
        "tasks": {name: _describe_task(name, results) for name in tasks["tasks"]},
        "truncated": cut / len(model.answers) if model.answers else 0.0,
        "chat": chat,
        "engine": recipe.engine.engine,
        "seed": recipe.run.seed,
        "lm_eval": lm_eval.__version__,
        "seconds": round(time.perf_counter() - started, 2),
        "completions": str(directory.path / COMPLETIONS),
    }
    show(summary)
    return summary


def import_lm_eval() -> Any:
    """Import lm-eval and silence its messages below errors. Raises MissingExtra."""
    try:
        import lm_eval
        import lm_eval.evaluator
        import lm_eval.tasks
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise MissingExtra("lm-eval", "stage harness (posttrain eval --harness)", "eval") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def load_tasks(recipe: HarnessRecipe) -> dict[str, Any]:
    """Load the tasks with their data, in the form of lm-eval's `evaluate`. Raises UserError and DataError."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    tasks: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in select_tasks(recipe, manager):
        terminal.note(f"reading task {name}")
        try:
            part = manager.load([name])
        except Exception as error:
            raise _task_load_error(name, error) from error
        for key in tasks:
            tasks[key] |= part.get(key, {})
    return tasks


def select_tasks(recipe: HarnessRecipe, manager: Any) -> list[str]:
    """Return the names of the tasks to load, each once.

    `*` matches any letters, and FILE.yaml is a task file. Raises UserError.
    """
    names: list[str] = []
    for name in recipe.tasks:
        if name.endswith((".yaml", ".yml")):
            names.append(str(find(name, recipe.base_dir, "task file")))
            continue
        matching = manager.match_tasks([name]) if "*" in name else [name] if name in manager.all_tasks else []
        if not matching:
            raise UserError(
                f"lm-eval has no task {name}",
                where="tasks",
                hint=did_you_mean(name, manager.all_tasks)
                or "list them with `lm-eval ls tasks`; name your own task by its FILE.yaml",
            )
        names += matching
    return list(dict.fromkeys(names))


def _task_load_error(name: str, error: Exception) -> DataError:
    """Return the DataError for a task whose file is wrong, or whose data cannot be loaded."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    offline = hub.offline_setting()
    hint = (
        f"{offline} is set: unset it, or download the data set first"
        if offline
        else "is the hub reachable, and signed in?"
    )
    if isinstance(error, KeyError | TypeError | AttributeError):
        hint = "look at the task's file"
    return DataError(f"task {name} cannot be read: {type(error).__name__}: {first}", hint=hint)


def _configure_task(name: str, task: Any, recipe: HarnessRecipe) -> None:
    """Refuse unsupported tasks, and set few-shot examples as lm-eval's command line does."""
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"task {name} runs programs that the model writes, and lm-eval has no sandbox for them",
            hint="grade programs with a recipe for `posttrain eval` and a code reward, which runs them in a sandbox",
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {name} has images, and the harness stage supports text only")
    configured = task.get_config("num_fewshot")
    if recipe.fewshot is not None and configured != 0:
        task.set_config(key="num_fewshot", value=recipe.fewshot)
    elif configured is None:
        task.set_config(key="num_fewshot", value=0)
    if recipe.fewshot and configured == 0:
        terminal.note(f"task {name} has no examples in its prompts; `fewshot` is ignored")
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


def iterate_metrics(results: Mapping[str, Any], recipe: HarnessRecipe) -> Iterator[tuple[str, Interval]]:
    """Yield every number of the requested tasks and groups by its name in the table.

    Tasks inside a group with its own numbers are skipped; they are in the summary's `tasks`.
    """
    groups = results.get("groups", {})
    subtasks = results.get("group_subtasks", {})
    inside = {task for group in groups for task in _leaf_tasks(group, subtasks)}
    for name in (*groups, *(task for task in results["samples"] if task not in inside)):
        leaves = _leaf_tasks(name, subtasks) if name in groups else [name]
        pooled = [values_by_problem(results["samples"][leaf]) for leaf in leaves]
        for key, value in results["results"][name].items():
            metric, comma, chain = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = results["results"][name].get(f"{metric}_stderr,{chain}")
                values = [v for part in pooled for v in part.get((metric, chain), {}).values()]
                label = f"{name} {metric}" + ("" if chain == NO_FILTER else f" ({chain})")
                yield label, metric_interval(values, float(value), error, recipe)


def _leaf_tasks(group: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tasks of a group, including those of nested groups."""
    leaves = [leaf for name in subtasks.get(group, ()) for leaf in (_leaf_tasks(name, subtasks) or [name])]
    return list(dict.fromkeys(leaves))


def values_by_problem(samples: Iterable[Mapping[str, Any]]) -> Values:
    """Return the value of each problem by metric and filter, for metrics with one number per problem."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample.get(metric)
            if isinstance(value, bool | int | float | np.number):
                values.setdefault((metric, sample["filter"]), {})[sample["doc_id"]] = float(value)
    return values


def metric_interval(values: Sequence[float], value: float, error: Any, recipe: HarnessRecipe) -> Interval:
    """Compute the interval of a metric: a bootstrap for a mean over problems, else from lm-eval's standard error.

    error: that standard error, if any.
    """
    if values and abs(float(np.mean(values)) - value) <= MEAN_TOLERANCE:
        return bootstrap_ci(values, level=recipe.level, resamples=recipe.bootstrap, seed=recipe.run.seed)
    if not isinstance(error, int | float):
        note = "not a mean over problems, and lm-eval gives no standard error"
        return Interval(value, value, value, recipe.level, len(values), False, note)
    half = NormalDist().inv_cdf((1 + recipe.level) / 2) * float(error)
    note = "not a mean over problems: lm-eval's standard error"
    return Interval(value, value - half, value + half, recipe.level, len(values), True, note)


def _describe_task(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's entry of the summary: its numbers from lm-eval, version, examples, problems."""
    numbers = {key: value for key, value in results["results"][name].items() if "," in key}
    count = results["n-samples"][name]
    return {
        **numbers,
        "version": results["versions"].get(name),
        "fewshot": results["n-shot"].get(name),
        "problems": count["effective"],
        "of": count["original"],
    }


def _write_results(directory: RunDirectory, results: Mapping[str, Any], shown: int) -> None:
    """Write completions.jsonl, problems.jsonl, and a few samples for the report."""
    rows, problems = [], []
    for task, samples in results["samples"].items():
        values = values_by_problem(samples)
        first = next(iter(values), None)
        for sample in samples:
            scores = {
                m: values[m, sample["filter"]].get(sample["doc_id"])
                for m in sample["metrics"]
                if (m, sample["filter"]) in values
            }
            rows.append(
                {
                    "uid": f"{task}/{sample['doc_id']}",
                    "filter": sample["filter"],
                    "prompt": str(sample["arguments"][0][0]),
                    "completion": "\n".join(str(text) for response in sample["resps"] for text in response),
                    "graded": [str(answer) for answer in sample["filtered_resps"]],
                    "target": str(sample["target"]),
                    "scores": scores,
                }
            )
        if first is not None:
            problems += [
                {"uid": f"{task}/{n}", "metric": first[0], "accuracy": v} for n, v in sorted(values[first].items())
            ]
    write_text(directory.path / COMPLETIONS, to_lines(rows))
    write_text(directory.path / PROBLEMS, to_lines(problems))
    once = {row["uid"]: row for row in reversed(rows)}
    with closing(directory.samples(resume_after=None)) as log:
        log.write(0, list(reversed(once.values()))[:shown])


def show(summary: Mapping[str, Any]) -> None:
    """Print the closing table and remarks on stderr."""
    console = terminal.console(stderr=True, markup=False, highlight=False)
    console.print(result_table(summary))
    for line in remarks(summary):
        console.print(line, soft_wrap=True)


def remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about problems, prompts and truncated answers."""
    asked = "by the chat template" if summary["chat"] else "as plain text"
    yield f"{count_noun(summary['problems'], 'problem')} of lm-eval {summary['lm_eval']}, asked {asked}"
    limited = {name: task for name, task in summary["tasks"].items() if task["problems"] < task["of"]}
    if limited:
        yield "only a part: " + ", ".join(f"{name} {t['problems']} of {t['of']}" for name, t in limited.items())
    if summary["truncated"]:
        yield f"{100 * summary['truncated']:.1f}% of the answers hit the limit (max_new_tokens)"
