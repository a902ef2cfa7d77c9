"""The verbs that run a recipe: sft, dpo, rl, merge, eval, run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.guard import DEBUG, RESUME, RUN, say

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded

VERBS = {
    "sft": "Supervised fine-tuning.",
    "dpo": "Preference optimisation on pairs (DPO, SimPO).",
    "rl": "Reinforcement learning with verifier rewards.",
    "merge": "Merge models.",
    "eval": "Measure a model's accuracy on rows that reward scripts grade.",
    "run": "Run a pipeline of stages.",
}

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values to change.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would run, run nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output (default: the newest).")]
Output = Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Run directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    for verb, about in VERBS.items():
        app.command(verb, help=about)(_command(verb))


def _command(verb: str) -> Callable[..., None]:
    def command(
        ctx: typer.Context,
        recipe: Recipe,
        overrides: Overrides = None,
        dry_run: DryRun = False,
        resume: Resume = False,
        output: Output = None,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        from posttrain.cli import preflight
        from posttrain.recipe.load import load

        ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
        loaded = load(recipe, overrides or [], stage=verb)
        preflight.check(loaded)
        if dry_run:
            preview(loaded, output, as_json)
            return
        summary, path = execute(ctx, loaded, output, resume, ["posttrain", verb, recipe, *(overrides or [])])
        report(summary, path, as_json)

    return command


def execute(
    ctx: typer.Context, loaded: Loaded, output: Path | None, resume: bool, typed: list[str]
) -> tuple[dict[str, Any], Path]:
    """Run a loaded recipe in its run directory; returns the summary and the directory. `typed`: the command so far."""
    from posttrain.run.directory import RunDirectory

    wanted = output or (Path(loaded.recipe.run.output) if loaded.recipe.run.output else None)
    opened = RunDirectory.open(wanted, name=loaded.name, text=loaded.text, resolved=loaded.resolved, resume=resume)
    with opened as directory:
        ctx.meta[RUN] = directory
        ctx.meta[RESUME] = [*typed, "--output", str(directory.path), "--resume"]
        say(f"run directory: {directory.path}")
        from posttrain.pipeline import run_stage

        return run_stage(loaded.recipe, directory), directory.path


def preview(loaded: Loaded, output: Path | None, as_json: bool) -> None:
    """What `--dry-run` prints: every value that would be used, with its origin."""
    from posttrain.cli.show import print_recipe

    print_recipe(loaded, as_json)
    where = output or loaded.recipe.run.output or f"runs/{loaded.name}/..."
    say(f"dry run: the recipe is right; posttrain {loaded.recipe.verb} would write to {where}")


def report(summary: dict[str, Any], path: Path, as_json: bool) -> None:
    """The end of a run: its summary on stdout, where it is on stderr."""
    from posttrain.cli.show import print_summary

    print_summary(summary, as_json)
    say(f"run directory: {path}")
    if (path / "report.html").is_file():
        say(f"report:        {path / 'report.html'}")
