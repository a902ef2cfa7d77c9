"""`posttrain sweep RECIPE KEY=A,B ... run.seed=0,1,2`: a run for every combination of values, and a results table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.guard import DEBUG, RESUME, RUN, say
from posttrain.cli.run_messages import print_notes
from posttrain.cli.stage import TRAINING, Debug, Json, Recipe
from posttrain.errors import RunError, UserError, count_noun

if TYPE_CHECKING:
    from posttrain.recipe.grid import GridPoint
    from posttrain.recipe.load import Loaded
    from posttrain.run.children import Child

SUMMARY_METRICS = ("accuracy", "reward_last", "loss_last", "mean_tokens")  # summary values shown beside the criterion
TABLE = "table.md"  # the table and its findings, in the run directory
CAVEAT = "All runs are shown. The best run is chosen on these numbers: evaluate it on other data before you report it."


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("sweep")(sweep)


def sweep(
    ctx: typer.Context,
    recipe: Recipe,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.PATH=VALUE",
            help="Values to sweep (KEY=A,B,C) or to set (KEY=A); runs that differ in run.seed only are repetitions.",
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, help="Number of runs at the same time.")
    ] = 1,
    evaluation: Annotated[
        str | None, typer.Option("--eval", metavar="RECIPE", help="Eval recipe to run on each trained model.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print the commands that would run; run nothing.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the sweep in --output (default: this recipe's newest sweep)."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Directory of the sweep (default: new in runs/)."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train with every combination of values and compare the runs in a table, with intervals over seeds.

      posttrain sweep r.yaml optim.lr=1e-5,3e-5 run.seed=0,1,2 --parallel 2 --output runs/lr

    Other runs continue if one fails; failed runs are listed at the end. --resume continues unfinished and failed runs.
    """
    from posttrain.cli import packages, preflight
    from posttrain.recipe.grid import grid
    from posttrain.recipe.load import load
    from posttrain.report.live import keep_report
    from posttrain.run.directory import RunDirectory

    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
    refuse_other_stages(recipe)
    fixed, points = grid(overrides or [])
    first = preflight.load(recipe, [*fixed, *points[0].overrides])
    for point in points[1:]:  # check every value before the first run
        load(recipe, [*fixed, *point.overrides], stage=first.recipe.verb)
    measure = preflight.load(evaluation, ["model.path=tiny"], stage="eval") if evaluation else None
    print_notes(first)
    if dry_run:
        for point in points:
            say(f"would run {' '.join(('posttrain', first.recipe.verb, recipe, *fixed, *point.overrides))}")
        return
    packages.require(first)
    if measure is not None:
        packages.require(measure)
    with RunDirectory.open(
        output, name=f"{first.name}-sweep", text=first.text, resolved=_shared_values(first, points), resume=resume
    ) as directory:
        typed = ["posttrain", "sweep", recipe, *(overrides or []), "--parallel", str(parallel)]
        ctx.meta[RUN] = directory
        ctx.meta[RESUME] = [*typed, *(["--eval", evaluation] if evaluation else []), "--output", str(directory.path)]
        ctx.meta[RESUME].append("--resume")
        say(f"run directory: {directory.path}")
        commands = {point: [first.recipe.verb, recipe, *fixed, *point.overrides] for point in points}
        with keep_report(directory) as page:
            failed = run_points(commands, directory.path, parallel, page.write)
            if evaluation:
                failed |= run_points(
                    {point: _eval_command(evaluation, directory.path / point.folder) for point in points},
                    directory.path, parallel, page.write, below="eval", needs="final",
                )  # fmt: skip
            measured = bool(evaluation) or first.recipe.verb == "eval"
            write_results(points, directory.path, failed, as_json, measured=measured)


def refuse_other_stages(recipe: str) -> None:
    """Raise UserError for a recipe whose stage neither trains nor evaluates, with how to try several values there."""
    from posttrain.recipe.keys import BY_NAME
    from posttrain.recipe.load import read_stage

    stage = BY_NAME.get(read_stage(recipe, "sweep"))
    if stage is None or stage.verb in (*TRAINING, "eval"):  # an unknown stage is reported when the recipe is loaded
        return
    hints = {
        "merge": "posttrain merge RECIPE --sweep KEY=VALUES --eval RECIPE",
        "run": "a pipeline has seeds of its own: posttrain run RECIPE 'seeds=[0,1,2]'",
    }
    what = f"a sweep needs a recipe that trains or evaluates, and this one is for `posttrain {stage.verb}`"
    raise UserError(what, hint=hints.get(stage.verb, ""))


def _shared_values(first: Loaded, points: Sequence[GridPoint]) -> dict[str, Any]:
    """Return the values that all runs share. On resume they must be unchanged; swept keys may get further values."""
    varied = {override.partition("=")[0] for point in points for override in point.overrides}
    heads = {key.partition(".")[0] for key in varied}
    return {key: value for key, value in first.resolved.items() if key not in heads and key != "run"}


def _eval_command(evaluation: str, run: Path) -> list[str]:
    return ["eval", evaluation, f"model.path={(run / 'final').resolve()}"]


def run_points(
    commands: Mapping[GridPoint, Sequence[str]],
    path: Path,
    parallel: int,
    after_each: Callable[[], None],
    *,
    below: str = "",
    needs: str = "",
) -> dict[str, str]:
    """Run every point without a summary in its own directory; return {name: reason} of those that failed.

    after_each: called whenever a run has ended. below: subdirectory of the point's directory. needs: a directory that
    the point must have; points without it are skipped.
    """
    from posttrain.run.atomic_io import read_json
    from posttrain.run.children import Child, run_children
    from posttrain.run.environment import usable_cpus

    children: list[Child] = []
    gpus = visible_gpus()
    for point, command in commands.items():
        folder = path / point.folder / below
        if read_json(folder / "summary.json") is not None or (needs and not (path / point.folder / needs).is_dir()):
            continue
        name = "/".join(filter(None, (point.folder, below)))
        log = path / "logs" / f"{name.replace('/', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cpus() // parallel))}
        if parallel > 1 and len(gpus) > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[len(children) % len(gpus)]
        going_on = ["--resume"] if folder.exists() else []
        typed = [sys.executable, "-m", "posttrain", *command, "--output", str(folder), *going_on]
        children.append(Child(name=name, command=typed, log=log, env={**env, "PYTHONUNBUFFERED": "1"}))
    return run_children(children, parallel, keep_going=True, after_each=after_each)


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs in CUDA_VISIBLE_DEVICES, or of all GPUs of this machine; no library is loaded."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device.strip() for device in listed.split(",") if device.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]


def write_results(
    points: Sequence[GridPoint], path: Path, failed: Mapping[str, str], as_json: bool, *, measured: bool
) -> None:
    """Write summary.json and the table, print it, and list the runs that failed. Raises RunError if any run failed."""
    from posttrain.cli.show import print_json
    from posttrain.report.page import PAGE
    from posttrain.run.atomic_io import write_json, write_text
    from posttrain.run.table import comparison_as_markdown, print_ranking, ranking_as_markdown

    settings: dict[str, dict[str, Path]] = {}
    for point in points:
        settings.setdefault(point.setting or "all runs", {})[point.seed or "0"] = path / point.folder
    done = [folder for runs in settings.values() for folder in runs.values() if (folder / "summary.json").is_file()]
    summary: dict[str, Any] = {"failed": dict(failed)} | (_compare_accuracies(settings) if measured else {})
    summary |= rank_settings(settings, done, summary.get("table", []))
    write_json(path / "summary.json", summary)
    compared = comparison_as_markdown(summary["table"], summary["findings"]) if summary.get("table") else ""
    write_text(path / TABLE, "\n".join(filter(None, [ranking_as_markdown(summary["ranking"]), compared])))
    if as_json:
        print_json(summary)
    else:
        print_ranking(summary["ranking"])
        if summary.get("table"):
            from posttrain.run.table import print_table

            print_table(summary["table"], summary["findings"])
    say(f"run directory: {path}\ntable:         {path / TABLE}\nreport:        {path / PAGE}")
    for name, why in failed.items():
        say(f"failed: {name}: {why}")
    if not done:
        raise RunError(f"all {count_noun(len(points), 'run')} failed", where=str(path), hint="their output is in logs/")
    if failed:
        raise RunError(f"{count_noun(len(failed), 'run')} of {len(points)} failed", where=str(path))


def rank_settings(
    settings: Mapping[str, Mapping[str, Path]], done: Sequence[Path], table: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return `settings`, a row per setting, and `ranking`: the same as text with its `head`, `rows` and sentences
    `says`.

    settings: setting -> seed -> run. done: the runs that have ended. table: accuracies of an evaluation, or empty.
    """
    from posttrain.evaluate.setting_ranks import (
        choose_criterion,
        describe_ranking,
        measure_setting,
        rank_rows,
        summarize_settings,
    )
    from posttrain.run.atomic_io import read_json
    from posttrain.run.table import settings_table

    criterion = choose_criterion(done, measured=bool(table))
    measured = {row["model"]: {**row["pooled"], "runs": len(row["seeds"]), "over": "problems"} for row in table}
    summaries = {
        setting: {seed: read_json(folder / "summary.json") for seed, folder in runs.items()}
        for setting, runs in settings.items()
    }
    finished = [summary for runs in summaries.values() for summary in runs.values() if summary]
    names = [name for name in SUMMARY_METRICS if any(name in summary for summary in finished)]
    nothing = {"mean": None, "low": None, "high": None, "runs": 0, "over": ""}
    rows = rank_rows(
        [
            {
                **row,
                "ranked": measured.get(row["setting"], nothing)
                if table
                else measure_setting([run for run in settings[row["setting"]].values() if run in done], criterion),
            }
            for row in summarize_settings(summaries, names)
        ],
        criterion,
    )
    head, cells = settings_table(rows, criterion.name, [name for name in names if name != criterion.name])
    says = [*describe_ranking(rows, criterion), CAVEAT] if finished else []
    if best := _describe_best_models(rows, settings):
        says.insert(-1, best)
    return {"settings": rows, "ranking": {"criterion": criterion.describe(), "head": head, "rows": cells, "says": says}}


def _describe_best_models(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Path]]) -> str:
    """Return a sentence with the paths of the models of the first row; empty if it has none."""
    if not rows or rows[0]["rank"] is None:
        return ""
    models = [str(run / "final") for run in settings[rows[0]["setting"]].values() if (run / "final").is_dir()]
    return f"Models of {rows[0]['setting']}: {', '.join(models)}." if models else ""


def _compare_accuracies(settings: Mapping[str, Mapping[str, Path]]) -> dict[str, Any]:
    """Return the closing table of a pipeline with a row per setting: accuracy on the problems, compared to the first
    setting.
    """
    from posttrain.evaluate.table import closing_table, describe_findings
    from posttrain.run.atomic_io import read_json
    from posttrain.run.table import trained_rows_note

    measured: dict[str, dict[str, Path]] = {}
    for setting, runs in settings.items():
        for seed, folder in runs.items():
            evaluation = folder / "eval" if (folder / "eval").is_dir() else folder  # in a sweep of evaluations
            if (evaluation / "problems.jsonl").is_file():
                measured.setdefault(setting, {})[seed] = evaluation
    rows = closing_table(measured)
    folders = [folder for by_seed in measured.values() for folder in by_seed.values()]
    notes = {trained_rows_note(read_json(folder / "summary.json") or {}) for folder in folders} - {""}
    return {"table": rows, "findings": [*describe_findings(rows), *sorted(notes)]}
