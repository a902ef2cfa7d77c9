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
from posttrain.cli.run_messages import report, tell_notes
from posttrain.errors import Problem, UserError

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded
    from posttrain.run.directory import RunDirectory

VERBS = {
    "sft": "Supervised fine-tuning.",
    "dpo": "Preference optimisation on pairs: DPO and its relatives.",
    "reward-model": "Train a reward model on pairs or labels, and report how far to trust it.",
    "rl": "Reinforcement learning with verifier rewards.",
    "merge": "Merge models.",
    "eval": "Measure a model's accuracy on rows that reward scripts grade.",
    "harness": "Measure a model on benchmarks of lm-eval.",
    "pairs": "Make preference pairs from the completions of an eval or a generate.",
    "run": "Run a pipeline of stages.",
}

TRAINING = ("sft", "dpo", "reward-model", "rl")  # what several GPUs can do together

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values to change.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the recipe and its scripts, print what would run, run nothing.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output (default: the newest).")]
AllowChanged = Annotated[
    bool, typer.Option("--allow-changed", help="With --resume: go on with rewards, tools or data that have changed.")
]
Output = Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Run directory.")]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="Processes, one a GPU (default: 1).")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", metavar="N", min=0, help="With --gpus: go on so often after a failure, from the checkpoint."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    own: dict[str, Callable[..., None]] = {"merge": _merge, "eval": _eval}
    for verb, about in VERBS.items():
        app.command(verb, help=about)(own.get(verb) or _command(verb))


def _command(verb: str) -> Callable[..., None]:
    """The command of a verb. Those that do not train have no --gpus and no job on a cluster: they are one process."""

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
            loaded = preflight.load(recipe, [*(overrides or []), *jobs.server_overrides(job, verb)], stage=verb)
            tell_notes(loaded)
            file = jobs.write_job(job, loaded, recipe, overrides or [], output, allow_changed=allow_changed)
            jobs.hand_over(job, file, submit=submit)
            return
        loaded = preflight.load(recipe, overrides or [], stage=verb)
        if dry_run:
            preview(loaded, output, as_json)
            return
        packages.require(loaded)
        typed = ["posttrain", verb, recipe, *(overrides or [])]
        if (gpus or 1) > 1:
            flags = [*(["--resume"] if resume else []), *(["--allow-changed"] if allow_changed else [])]
            if max_restarts:  # every start goes on in the same directory
                wanted = output or loaded.recipe.run.output
                output = Path(wanted) if wanted else default_path(loaded.name, loaded.resolved, resume=resume)
                refuse_unusable(output, resume)
            flags += [*(["--output", str(output)] if output else [])]
            flags += [*(["--json"] if as_json else []), *(["--debug"] if ctx.meta[DEBUG] else [])]
            raise typer.Exit(launch([*typed, *flags], gpus or 1, max_restarts))
        if max_restarts:
            raise UserError("--max-restarts starts several processes anew", hint="add --gpus N; torchrun has its own")
        summary, path = execute(ctx, loaded, output, resume, typed, allow_changed=allow_changed)
        report(summary, path, as_json)

    if verb not in TRAINING:
        signature = inspect.signature(command, eval_str=True)
        several = ("gpus", "max_restarts", *jobs.KINDS, "submit")
        kept = [parameter for name, parameter in signature.parameters.items() if name not in several]
        command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # what typer reads
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
            help="One merge a value (or KEY=a,b,c), each measured with --eval; several times: all combinations.",
        ),
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", metavar="RECIPE", help="The eval recipe of a sweep; its model is replaced.")
    ] = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    allow_changed: AllowChanged = False,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
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
        typer.Argument(metavar="RECIPE|MODEL", help="A recipe, or the name of a shipped one; with --harness, a model."),
    ],
    overrides: Overrides = None,
    harness: Annotated[
        str | None,
        typer.Option("--harness", metavar="TASKS", help="Benchmarks of lm-eval instead of a recipe: gsm8k,ifeval."),
    ] = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    allow_changed: AllowChanged = False,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
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
            f"--harness is for a model, and {recipe} is a recipe",
            hint="a recipe says `stage: harness` and `tasks: [...]`, and is run by `posttrain harness RECIPE`",
        )
    tasks = [name.strip() for name in harness.split(",") if name.strip()]
    values = {"stage": "harness", "model": {"path": find_source(recipe).path}, "tasks": tasks}
    given = {**values, "name": "harness"}
    loaded = load_dict(given, base_dir=Path.cwd(), where="command line", overrides=overrides or [])
    loaded = replace(loaded, text=yaml.safe_dump(values, sort_keys=False))
    preflight.check(loaded)
    if dry_run:
        preview(loaded, output, as_json)
        return
    packages.require(loaded)
    typed = ["posttrain", "eval", recipe, "--harness", harness, *(overrides or [])]
    summary, path = execute(ctx, loaded, output, resume, typed, allow_changed=allow_changed)
    report(summary, path, as_json)


def launch(typed: list[str], processes: int, max_restarts: int) -> int:
    """Run a typed command in several processes; the exit code of the whole."""
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
    """Run a loaded recipe in its run directory; returns the summary and the directory. `typed`: the command so far."""
    from posttrain.run import ranks
    from posttrain.run.directory import RunDirectory
    from posttrain.train.launch_fingerprint import named_files

    if allow_changed and not resume:
        raise UserError("--allow-changed is for a run that goes on", hint="add --resume")

    tell_notes(loaded)

    wanted = output or (Path(loaded.recipe.run.output) if loaded.recipe.run.output else None)

    def open_it() -> RunDirectory:
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

    with open_run(open_it, loaded) as directory:
        ctx.meta[RUN] = directory
        ctx.meta[RESUME] = [*typed, *_launch_words(), "--output", str(directory.path), "--resume"]
        if not directory.follows:
            say(f"run directory: {directory.path}")
            if model := getattr(loaded.recipe, "model", None):
                say(f"loading {model.path}")  # some seconds for torch alone, minutes for large models
        from posttrain.pipeline import run_stage

        with locate_errors(loaded):
            return run_stage(loaded.recipe, directory), directory.path


def _directory_before_restart() -> Path | None:
    from posttrain.train import distributed

    return distributed.directory_before_restart()


@contextlib.contextmanager
def locate_errors(loaded: Loaded) -> Iterator[None]:
    """Give an error that begins with a key of the recipe (`model.device: ...`), or names one as its place, the line of
    that key, and one of a reward the line of that reward."""
    try:
        yield
    except UserError as error:
        told = [_of_reward(_with_line(problem, loaded), loaded) for problem in error.problems]
        if told == list(error.problems):
            raise
        raise type(error).of(told) from error


def _with_line(problem: Problem, loaded: Loaded) -> Problem:
    """A problem without a place, or with a key as its place, with the line of the key."""
    if not problem.where:
        return replace(problem, where=_line_of(problem.what, loaded))
    if line := _line_of(problem.where, loaded):
        return replace(problem, where=line, what=f"{problem.where}: {problem.what}")
    return problem


def _of_reward(problem: Problem, loaded: Loaded) -> Problem:
    """A problem of `reward NAME` with the line of that entry of `rewards`, instead of a place in its file or data."""
    named = re.match(r"reward ([\w.-]+)", problem.where) or re.match(r"reward ([\w.-]+)", problem.what)
    names = [one.name or re.split(r"[.:]", one.use)[-1] for one in getattr(loaded.recipe, "rewards", ())]
    if not named or names.count(named[1]) != 1 or re.search(r":\d+:\d+$", problem.where):
        return problem
    key = f"rewards.{names.index(named[1])}"
    place = f"{problem.where}: " if problem.where else ""
    return replace(problem, where=loaded.origins[f"{key}.use"].mark, what=f"{key}: {place}{problem.what}")


def _line_of(what: str, loaded: Loaded) -> str:
    key = what.split(maxsplit=1)[0].rstrip(":") if what else ""
    origin = loaded.origins.get(key) if "." in key else None
    if origin is None and "." in key:  # a section: its first line that was written
        below = (one for name, one in loaded.origins.items() if name.startswith(f"{key}.") and one.kind != "default")
        origin = next(below, None)
    return origin.mark if origin and origin.kind != "default" else ""


@contextlib.contextmanager
def open_run(open_it: Callable[[], RunDirectory], loaded: Loaded) -> Iterator[RunDirectory]:
    """The run directory. Of several processes, all join, compare what they were started with, and use rank 0's."""
    from posttrain.run import ranks

    if ranks.world() == 1:
        with open_it() as directory:
            yield directory
        return
    ranks.claim_gpu()
    ranks.end_with_launcher()
    from posttrain.train import distributed, launch_fingerprint, rank_consistency

    with distributed.join_process_group():
        rank_consistency.check(launch_fingerprint.started_with(loaded))
        with distributed.open_directory(open_it) as directory:
            yield directory


def _launch_words() -> list[str]:
    """The --gpus with which this process was started as one of several."""
    from posttrain.run import ranks

    if not ranks.is_launched():
        return []
    again = os.environ.get(ranks.MAX_RESTARTS, "0")
    return ["--gpus", str(ranks.world()), *(["--max-restarts", again] if again != "0" else [])]


def preview(loaded: Loaded, output: Path | None, as_json: bool) -> None:
    """What `--dry-run` prints: every value that would be used, with its origin."""
    from posttrain.cli import packages
    from posttrain.cli.show import print_recipe

    print_recipe(loaded, as_json)
    tell_notes(loaded)
    where = output or loaded.recipe.run.output or f"runs/{loaded.name}/..."
    say(f"dry run: the recipe is right; posttrain {loaded.recipe.verb} would write to {where}")
    for problem in packages.find_missing_packages(loaded):
        say(f"not on this machine: {problem.what}; {problem.hint}")
