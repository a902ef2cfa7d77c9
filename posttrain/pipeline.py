"""Pipelines: stages in order, each in its own run directory, repeated for every seed, then a comparison table.

    runs/quickstart/TIME-HASH/seed-0/sft, seed-0/rl, ..., seed-1/sft, ...

A stage refers to an earlier stage of its seed: `stage:rl` is rl's final model, `stage:rollouts/completions.jsonl` a
file in its directory, and `run.max_minutes: stage:rl` is rl's training time. Finished stages are skipped on resume.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from posttrain import terminal
from posttrain.errors import Interrupted, MissingExtra, PosttrainError, RecipeError, RunError, UserError
from posttrain.garbage_collection import pause_collection
from posttrain.recipe.load import Loaded, load_dict
from posttrain.recipe.pipeline import MINUTES, REFERENCE, references
from posttrain.recipe.rounds import SAMPLERS
from posttrain.recipe.stages import PipelineRecipe, Stage
from posttrain.report.live import LivePage, keep_report
from posttrain.rollout import warm_process
from posttrain.rollout.engine_group import group_of
from posttrain.run import ranks, rounds
from posttrain.run.atomic_io import read_json, write_json
from posttrain.run.children import ERROR, MILESTONE, Child, run_children
from posttrain.run.directory import RunDirectory
from posttrain.run.environment import usable_cpus
from posttrain.run.interrupt import GracefulStop, stop_with_parent
from posttrain.run.jsonl import finite
from posttrain.run.progress import duration
from posttrain.run.resolved_recipe import refuse_other_recipe
from posttrain.track.start import track_run

RUNNERS = {
    "sft": "posttrain.train.sft:run",
    "dpo": "posttrain.train.preference:run",
    "reward-model": "posttrain.train.reward_model:run",
    "rl": "posttrain.train.rl:run",
    "merge": "posttrain.merge.run:run",
    "eval": "posttrain.evaluate.run:run",
    "harness": "posttrain.evaluate.harness:run",
    "generate": "posttrain.evaluate.generate:run",
    "pairs": "posttrain.evaluate.pairs:run",
    "run": "posttrain.pipeline:run",
}
TRAINING_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")


def run_stage(recipe: Stage, directory: RunDirectory) -> dict[str, Any]:
    """Run one stage in its open directory and return its summary.

    Writes summary.json, which marks the stage as finished, and keeps status.json and report.html up to date. Of several
    processes, only the one that opened the directory for writing writes.
    """
    if engines := count_engine_processes(recipe):
        warm_process.start(engines)
    try:
        runner = _runner_of(recipe)
        with track_run(getattr(recipe, "track", ()), directory), keep_report(directory):
            summary: dict[str, Any] = finite(runner(recipe, directory))
            if not directory.follows:
                write_json(directory.path / "summary.json", summary)
    finally:
        warm_process.close()  # the stage may have ended before it used its engine
    return summary


def _runner_of(recipe: Stage) -> Callable[[Stage, RunDirectory], dict[str, Any]]:
    """Return the function that runs a stage. Raises MissingExtra if a training package is not installed."""
    try:
        return import_runner(RUNNERS[recipe.verb])
    except ModuleNotFoundError as error:
        if error.name not in TRAINING_PACKAGES:
            raise
        raise MissingExtra(error.name, f"posttrain {recipe.verb}", "train") from error


def count_engine_processes(recipe: Stage) -> int:
    """Return the number of vLLM engine processes that a stage starts."""
    section = getattr(recipe, "rollout", None) or getattr(recipe, "engine", None)
    is_beside = section is not None and section.engine == "vllm" and section.vllm.server is None
    if section is None or not is_beside or not group_of(ranks.rank(), section.vllm.tensor_parallel).is_first:
        return 0
    return int(section.vllm.engines)


def import_runner(name: str) -> Callable[[Stage, RunDirectory], dict[str, Any]]:
    """Import `module:function`, which imports torch and the libraries that depend on it."""
    module, _, function = name.partition(":")
    if module not in sys.modules:
        with pause_collection(freeze=True):
            importlib.import_module(module)
    return cast("Callable[[Stage, RunDirectory], dict[str, Any]]", getattr(importlib.import_module(module), function))


def run(recipe: PipelineRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Run all unfinished stages; return the summaries of all stages and seeds, with the comparison table."""
    if len(recipe.seeds) == 1:
        run_seed(recipe, directory.path, recipe.seeds[0])
    else:
        run_children(_seed_processes(recipe, directory), recipe.parallel)
    return summarize(recipe, directory.path)


@dataclass(frozen=True)
class FinishedStage:
    """A finished stage of one seed."""

    path: Path
    summary: Mapping[str, Any]
    skipped: bool  # finished before this start


def resolve_references(values: Any, done: Mapping[str, FinishedStage], path: tuple[str, ...] = ()) -> Any:
    """Return the values with every `stage:NAME` replaced by a path, or by minutes at `run.max_minutes`."""
    if isinstance(values, Mapping):
        return {key: resolve_references(value, done, (*path, key)) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [resolve_references(value, done, path) for value in values]
    match = REFERENCE.match(values) if isinstance(values, str) else None
    if match is None:
        return values
    stage = done[match[1]]
    if path == MINUTES:
        return _training_minutes(match[1], stage.summary)
    return str(stage.path / (match[2] or "final"))


def _training_minutes(name: str, summary: Mapping[str, Any]) -> float:
    seconds = summary.get("train_seconds")
    if not isinstance(seconds, (int, float)) or seconds <= 0:
        raise RecipeError(f"run.max_minutes: stage:{name} has no training time", hint="name a stage that trains")
    return seconds / 60


def run_seed(recipe: PipelineRecipe, path: Path, seed: int) -> dict[str, FinishedStage]:
    """Run all stages of one seed in this process, so that heavy libraries are imported once."""
    done: dict[str, FinishedStage] = {}
    GracefulStop.take_ignored_signal()  # discard a signal from before these stages
    samplers = [stage["name"] for stage in recipe.stages if stage["stage"] in SAMPLERS]
    for stage in recipe.stages:
        name = stage["name"]
        if number := GracefulStop.take_ignored_signal():
            raise Interrupted(f"stopped after stage {list(done)[-1]}", where=str(path), number=number)
        values = resolve_references(
            {**stage, "run": {**stage.get("run", {}), "seed": rounds.seed(seed, name, samplers)}}, done
        )
        loaded = load_dict(values, base_dir=recipe.base_dir, where=f"stage {name}")
        folder = path.resolve() / f"seed-{seed}" / name
        summary = read_json(folder / "summary.json")
        if summary is not None:
            again = [needed for _, needed, _ in references(stage) if not done[needed].skipped]
            _refuse_stale(folder, loaded, again)
            done[name] = FinishedStage(folder, summary, skipped=True)
            continue
        started = time.perf_counter()
        summary = run_in_folder(folder, loaded, name)
        took = duration(time.perf_counter() - started)
        terminal.note(f"{MILESTONE}{name} in {took}  {format_headline(summary)}")
        done[name] = FinishedStage(folder, summary, skipped=False)
        LivePage(path).write()
        gc.collect()  # free the stage's model before the next one is loaded
        for line in rounds.milestones([s["name"] for s in recipe.stages], {n: d.summary for n, d in done.items()}):
            terminal.note(f"{MILESTONE}{line}")
    return done


def run_in_folder(folder: Path, loaded: Loaded, name: str) -> dict[str, Any]:
    """Run a recipe in its own directory, resuming if it was begun, and return the summary."""
    return (_run_in_child if uses_vllm(loaded.recipe) else _run_in_process)(folder, loaded, name)


def _run_in_process(folder: Path, loaded: Loaded, name: str) -> dict[str, Any]:
    """Run a recipe in this process, in its own directory."""
    text = json.dumps(loaded.resolved, indent=2) + "\n"  # JSON is valid YAML, so the file is a runnable recipe
    begun = folder.exists() and any(folder.iterdir())
    try:
        with RunDirectory.open(folder, name=name, text=text, resolved=loaded.resolved, resume=begun) as directory:
            return run_stage(loaded.recipe, directory)
    except PosttrainError:
        terminal.note(f"stage {name} did not finish; its directory is {folder}")
        raise


def uses_vllm(recipe: Stage) -> bool:
    """Return whether the stage runs a vLLM engine, which frees its GPU memory only when its process ends."""
    engine = getattr(recipe, "engine", None) or getattr(recipe, "rollout", None)
    return engine is not None and engine.engine == "vllm"


def _run_in_child(folder: Path, loaded: Loaded, name: str) -> dict[str, Any]:
    """Run the stage in a separate process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    request = folder.with_suffix(".json")
    write_json(request, {"stage": loaded.resolved, "base_dir": str(loaded.recipe.base_dir.resolve())})
    command = [sys.executable, "-m", "posttrain.pipeline", "stage", str(request), str(folder), name]
    run_children([Child(name, command, folder.with_suffix(".log"))], parallel=1)
    summary = read_json(folder / "summary.json")
    if summary is None:
        raise RunError(f"stage {name} ended without a summary", allowed=f"its output is in {folder}.log")
    return summary


def _refuse_stale(folder: Path, loaded: Loaded, rerun: Sequence[str]) -> None:
    """Raise UserError if a finished stage has another recipe now, or a stage that it depends on ran again."""
    refuse_other_recipe(folder, read_json(folder / "resolved.json"), loaded.resolved, may_change={"run.output"})
    if rerun:
        raise UserError(
            f"{folder} was made from an older run of {', '.join(rerun)}, which ran again",
            hint=f"remove it (rm -r {shlex.quote(str(folder))}) and resume",
        )


def format_headline(summary: Mapping[str, Any]) -> str:
    """Return the most important numbers of a summary on one line."""
    shown = ("accuracy", "mean_tokens", "reward_first", "reward_last", "loss_first", "loss_last")
    numbers = {key: summary[key] for key in shown if isinstance(summary.get(key), (int, float))}
    return "  ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in numbers.items())


def _seed_processes(recipe: PipelineRecipe, directory: RunDirectory) -> list[Child]:
    """Return one process per seed, each with its share of the cores."""
    request = directory.logs / "pipeline.json"
    write_json(request, {"stages": recipe.stages, "base_dir": str(recipe.base_dir.resolve())})
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, usable_cpus() // min(recipe.parallel, len(recipe.seeds)))
    return [
        Child(
            name=f"seed {seed}",
            command=[sys.executable, "-m", "posttrain.pipeline", "seed", str(request), str(directory.path), str(seed)],
            log=directory.logs / f"seed-{seed}.log",
            env={"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
        )
        for seed in recipe.seeds
    ]


def summarize(recipe: PipelineRecipe, path: Path) -> dict[str, Any]:
    """Return the summary of a pipeline.

    `seeds`: {seed: {stage: summary}}; `rounds`: {name: one row per round}, if there are any; `table`: the compared
    evaluations, if the recipe names any.
    """
    names = [stage["name"] for stage in recipe.stages]
    seeds = {
        str(seed): {name: read_json(path / f"seed-{seed}" / name / "summary.json") for name in names}
        for seed in recipe.seeds
    }
    summary: dict[str, Any] = {"seeds": seeds}
    if by_round := rounds.progress(seeds.values()):
        summary["rounds"] = by_round
    if not recipe.table:
        return summary
    from posttrain.evaluate.table import closing_table, describe_findings

    labels = _table_labels(recipe)
    rows = closing_table({labels[name]: {s: path / f"seed-{s}" / name for s in seeds} for name in recipe.table})
    rows = [{**row, "stage": name} for row, name in zip(rows, recipe.table, strict=True)]
    return {**summary, "table": rows, "findings": describe_findings(rows)}


def _table_labels(recipe: PipelineRecipe) -> dict[str, str]:
    """Return the table label of each eval stage: the stage whose model it evaluates, or its own name if not unique."""
    stages = {stage["name"]: stage for stage in recipe.stages}
    matches = {name: REFERENCE.fullmatch(str(stages[name]["model"]["path"])) for name in recipe.table}
    labels = {name: match[1] if match and not match[2] else name for name, match in matches.items()}
    once = {name for name in labels if list(labels.values()).count(labels[name]) == 1}
    return {name: labels[name] if name in once else name for name in labels}


def main(kind: str, request: str, path: str, name: str) -> int:
    """Run one seed or one stage: the child process of `_seed_processes` and `_run_in_child`.

    An error is printed to stderr as one message, which the parent prints.
    """
    stop_with_parent()
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    base_dir = Path(asked["base_dir"])
    try:
        if kind == "stage":
            _run_in_process(Path(path), load_dict(asked["stage"], base_dir=base_dir, where=f"stage {name}"), name)
        else:
            values = {"stage": "pipeline", "stages": asked["stages"]}
            loaded = load_dict(values, base_dir=base_dir, where="pipeline")
            assert isinstance(loaded.recipe, PipelineRecipe)
            run_seed(loaded.recipe, Path(path), int(name))
    except PosttrainError as error:
        terminal.note(f"{ERROR}{error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
