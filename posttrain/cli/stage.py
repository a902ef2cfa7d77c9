"""The verbs that run a recipe: sft, dpo, reward-model, rl, merge, eval, harness, pairs, run."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli import jobs
from posttrain.cli.guard import DEBUG, RESUME, RUN, say
from posttrain.cli.run_messages import print_notes, print_run_summary
from posttrain.errors import Problem, RunError, UserError

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded
    from posttrain.run.directory import RunDirectory

VERBS = {
    "sft": "Train a model by supervised fine-tuning.",
    "dpo": "Train a model on preference pairs: DPO and related losses.",
    "reward-model": "Train a reward model on pairs or labels, and report its held-out accuracy and calibration.",
    "rl": "Train a model by reinforcement learning with verifier rewards (GRPO and related methods).",
    "merge": "Merge models.",
    "eval": "Evaluate a model's accuracy on rows graded by reward scripts.",
    "harness": "Evaluate a model on benchmarks of lm-eval.",
    "pairs": "Make preference pairs from the completions of an eval or generate run.",
    "run": "Run a pipeline of stages.",
}

TRAINING = ("sft", "dpo", "reward-model", "rl")  # stages that run on several GPUs

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE", help="Recipe keys to override, each as key.path=value."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the recipe and its scripts and print all values; run nothing.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --output (default: the newest run of this recipe).")
]
AllowChanged = Annotated[
    bool, typer.Option("--allow-changed", help="With --resume: accept rewards, tools or data that have changed.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="DIR", help="Run directory (default: the recipe's run.output, or a new one in runs/)."
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="Number of GPUs, with one process each (default: 1).")
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        metavar="N",
        min=0,
        help="With --gpus: restart up to N times after a failure, from the last checkpoint.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    own: dict[str, Callable[..., None]] = {"merge": _merge, "eval": _eval}
    for verb, about in VERBS.items():
        app.command(verb, help=about)(own.get(verb) or _command(verb))


def _command(verb: str) -> Callable[..., None]:
    """Return the command of a verb. Verbs that do not train run in one process: they have no --gpus and no cluster
    jobs.
    """

    def command(
        ctx: typer.Context,
        recipe: Recipe,
        overrides: Overrides = None,
        dry_run: DryRun = False,
        resume: Resume = False,
        allow_changed: AllowChanged = False,
        output: Output = None,
        as_json: Json = False,
        debug: Debug = False,
        gpus: Gpus = None,
        max_restarts: MaxRestarts = 0,
        slurm: jobs.Slurm = None,
        kubernetes: jobs.Kubernetes = None,
        skypilot: jobs.Skypilot = None,
        submit: jobs.Submit = False,
    ) -> None:
        from posttrain.cli import packages, preflight
        from posttrain.run import ranks
        from posttrain.run.directory import default_path, refuse_unusable

        ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
        if verb not in TRAINING and ranks.world() > 1:
            raise UserError(f"`posttrain {verb}` runs in one process", hint="start it without torchrun")
        if job := jobs.choose_job(slurm, kubernetes, skypilot, submit=submit):
            changes = [*(overrides or []), *jobs.server_overrides(job, verb)]
            loaded = preflight.load(recipe, changes, stage=verb, without=["gpu"])
            print_notes(loaded)
            file = jobs.write_job(job, loaded, recipe, overrides or [], output, allow_changed=allow_changed)
            jobs.submit_job(job, file, submit=submit)
            return
        loaded = preflight.load(recipe, overrides or [], stage=verb)
        if dry_run:
            print_preview(loaded, output, as_json)
            return
        packages.require(loaded)
        typed = ["posttrain", verb, recipe, *(overrides or [])]
        if (gpus or 1) > 1:
            flags = [*(["--resume"] if resume else []), *(["--allow-changed"] if allow_changed else [])]
            if max_restarts:  # every restart continues in the same directory
                wanted = output or loaded.recipe.run.output
                output = Path(wanted) if wanted else default_path(loaded.name, loaded.resolved, resume=resume)
                refuse_unusable(output, resume)
            flags += [*(["--output", str(output)] if output else [])]
            flags += [*(["--json"] if as_json else []), *(["--debug"] if ctx.meta[DEBUG] else [])]
            raise typer.Exit(launch([*typed, *flags], gpus or 1, max_restarts))
        if max_restarts:
            raise UserError("--max-restarts needs --gpus", hint="add --gpus N; under torchrun use torchrun's option")
        summary, path = execute(ctx, loaded, output, resume, typed, allow_changed=allow_changed)
        print_run_summary(summary, path, as_json)

    if verb not in TRAINING:
        signature = inspect.signature(command, eval_str=True)
        several = ("gpus", "max_restarts", *jobs.KINDS, "submit")
        parameters = [parameter for name, parameter in signature.parameters.items() if name not in several]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
    return command


def _merge(
    ctx: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=START:STOP:STEP",
            help="Merge with each value (or KEY=a,b,c) and evaluate each model with --eval; repeatable: tries all "
            "combinations.",
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option("--eval", metavar="RECIPE", help="Eval recipe for --sweep; its model is replaced by each merge."),
    ] = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    allow_changed: AllowChanged = False,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run `posttrain merge`: a merge, or with --sweep and --eval a merge and an evaluation per value."""
    if not sweep and evaluation is None:
        _command("merge")(ctx, recipe, overrides, dry_run, resume, allow_changed, output, as_json, debug)
        return
    if not sweep or evaluation is None:
        raise UserError(
            "a sweep needs both --sweep and --eval", hint="posttrain merge R --sweep weight=0:1:0.1 --eval E"
        )
    from posttrain.cli import sweep as sweeping

    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
    sweeping.sweep(
        ctx, recipe, overrides or [], sweep, evaluation, output, resume=resume, dry_run=dry_run, as_json=as_json
    )


def _eval(
    ctx: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|MODEL", help="A recipe file or shipped recipe; with --harness, a model."),
    ],
    overrides: Overrides = None,
    harness: Annotated[
        str | None,
        typer.Option("--harness", metavar="TASKS", help="Evaluate MODEL on these lm-eval benchmarks: gsm8k,ifeval."),
    ] = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    allow_changed: AllowChanged = False,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run `posttrain eval`: a recipe, or with --harness a model on lm-eval benchmarks."""
    if harness is None:
        _command("eval")(ctx, recipe, overrides, dry_run, resume, allow_changed, output, as_json, debug)
        return
    import yaml

    from posttrain.cli import packages, preflight
    from posttrain.export.source import find_source
    from posttrain.recipe.load import load_dict

    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
    if recipe.endswith((".yaml", ".yml")):
        raise UserError(
            f"--harness needs a model, and {recipe} is a recipe",
            hint="a recipe has `stage: harness` and `tasks: [...]`, and is run by `posttrain harness RECIPE`",
        )
    tasks = [name.strip() for name in harness.split(",") if name.strip()]
    values = {"stage": "harness", "model": {"path": find_source(recipe).path}, "tasks": tasks}
    given = {**values, "name": "harness"}
    loaded = load_dict(given, base_dir=Path.cwd(), where="command line", overrides=overrides or [])
    loaded = replace(loaded, text=yaml.safe_dump(values, sort_keys=False))
    preflight.check(loaded)
    if dry_run:
        print_preview(loaded, output, as_json)
        return
    packages.require(loaded)
    typed = ["posttrain", "eval", recipe, "--harness", harness, *(overrides or [])]
    summary, path = execute(ctx, loaded, output, resume, typed, allow_changed=allow_changed)
    print_run_summary(summary, path, as_json)


def launch(typed: list[str], processes: int, max_restarts: int) -> int:
    """Run a typed command in several processes; return their common exit code."""
    from posttrain.run import ranks

    if ranks.world() > 1:
        raise UserError("--gpus starts the processes itself", hint="leave it out under torchrun")
    return ranks.launch([sys.executable, "-m", *typed], processes, max_restarts)


def execute(
    ctx: typer.Context,
    loaded: Loaded,
    output: Path | None,
    resume: bool,
    typed: list[str],
    *,
    allow_changed: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Run a loaded recipe in its run directory; return (summary, directory). typed: the command line so far, for
    `--resume`.
    """
    from posttrain.run import ranks
    from posttrain.run.directory import RunDirectory
    from posttrain.train.launch_fingerprint import named_files

    if allow_changed and not resume:
        raise UserError("--allow-changed needs --resume", hint="add --resume")

    print_notes(loaded)

    wanted = output or (Path(loaded.recipe.run.output) if loaded.recipe.run.output else None)

    def open_directory() -> RunDirectory:
        before = _directory_before_restart() if ranks.world() > 1 else None
        path = wanted or before
        again = before is not None or ranks.restarts() > 0
        return RunDirectory.open(
            path,
            name=loaded.name,
            text=loaded.text,
            resolved=loaded.resolved,
            resume=resume or (again and path is not None and path.exists()),
            inputs=named_files(loaded),
            allow_changed=allow_changed,
        )

    with open_run(open_directory, loaded) as directory:
        ctx.meta[RUN] = directory
        ctx.meta[RESUME] = [*typed, *_launch_options(), "--output", str(directory.path), "--resume"]
        if not directory.follows:
            say(f"run directory: {directory.path}")
            if model := getattr(loaded.recipe, "model", None):
                say(f"loading {model.path}")  # importing torch takes seconds, loading a large model minutes
        from posttrain.pipeline import run_stage

        with locate_errors(loaded):
            return run_stage(loaded.recipe, directory), directory.path


def _directory_before_restart() -> Path | None:
    from posttrain.train import distributed

    return distributed.directory_before_restart()


@contextlib.contextmanager
def locate_errors(loaded: Loaded) -> Iterator[None]:
    """Add the recipe line to errors that begin with a recipe key (`model.device: ...`), have a key as their place, or
    name a reward.
    """
    try:
        yield
    except (UserError, RunError) as error:
        located = [_with_reward_line(_with_line(problem, loaded), loaded) for problem in error.problems]
        if located == list(error.problems):
            raise
        raise type(error).of(located) from error


def _with_line(problem: Problem, loaded: Loaded) -> Problem:
    """Return the problem with the line of the recipe key that it begins with or has as its place."""
    if not problem.where:
        return replace(problem, where=_find_line(problem.what, loaded))
    if line := _find_line(problem.where, loaded):
        return replace(problem, where=line, what=f"{problem.where}: {problem.what}")
    return problem


def _with_reward_line(problem: Problem, loaded: Loaded) -> Problem:
    """Return a problem of `reward NAME` with the line of that entry of `rewards`, instead of a place in its file or
    data.
    """
    named = re.match(r"reward ([\w.-]+)", problem.where) or re.match(r"reward ([\w.-]+)", problem.what)
    names = [reward.name or re.split(r"[.:]", reward.use)[-1] for reward in getattr(loaded.recipe, "rewards", ())]
    if not named or names.count(named[1]) != 1 or re.search(r":\d+:\d+$", problem.where):
        return problem
    key = f"rewards.{names.index(named[1])}"
    place = f"{problem.where}: " if problem.where else ""
    return replace(problem, where=loaded.origins[f"{key}.use"].mark, what=f"{key}: {place}{problem.what}")


def _find_line(what: str, loaded: Loaded) -> str:
    """Return the line of the recipe key that a text begins with; "" if it begins with none."""
    key = what.split(maxsplit=1)[0].rstrip(":") if what else ""
    origin = loaded.origins.get(key) if "." in key else None
    if origin is None and "." in key:  # a section: the line of its first value that is not a default
        below = (
            origin for name, origin in loaded.origins.items() if name.startswith(f"{key}.") and origin.kind != "default"
        )
        origin = next(below, None)
    return origin.mark if origin and origin.kind != "default" else ""


@contextlib.contextmanager
def open_run(open_directory: Callable[[], RunDirectory], loaded: Loaded) -> Iterator[RunDirectory]:
    """Open the run directory. Several processes first join a process group, compare their recipes, and use rank 0's
    directory.
    """
    from posttrain.run import ranks

    if ranks.world() == 1:
        with open_directory() as directory:
            yield directory
        return
    ranks.claim_gpu()
    ranks.end_with_launcher()
    from posttrain.train import distributed, launch_fingerprint, rank_consistency

    with distributed.join_process_group():
        rank_consistency.check(launch_fingerprint.launch_facts(loaded))
        with distributed.open_directory(open_directory) as directory:
            yield directory


def _launch_options() -> list[str]:
    """Return the --gpus and --max-restarts options with which this process was started, if it is one of several."""
    from posttrain.run import ranks

    if not ranks.is_launched():
        return []
    again = os.environ.get(ranks.MAX_RESTARTS, "0")
    return ["--gpus", str(ranks.world()), *(["--max-restarts", again] if again != "0" else [])]


def print_preview(loaded: Loaded, output: Path | None, as_json: bool) -> None:
    """Print what `--dry-run` shows: every value that would be used, with its origin."""
    from posttrain.cli import packages
    from posttrain.cli.show import print_recipe

    print_recipe(loaded, as_json)
    print_notes(loaded)
    where = output or loaded.recipe.run.output or f"runs/{loaded.name}/..."
    say(f"dry run: the recipe is valid; posttrain {loaded.recipe.verb} would write to {where}")
    for problem in packages.find_missing_packages(loaded):
        say(f"not on this machine: {problem.what}; {problem.hint}")
