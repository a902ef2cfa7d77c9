"""`posttrain preflight`: a few rollouts of an rl recipe's start model, sampled before a long run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.run_messages import print_notes
from posttrain.cli.show import print_json
from posttrain.cli.stage import Json, Overrides, Recipe
from posttrain.errors import UserError

SAMPLE = 64  # default maximum number of prompts
BAR_CHARS = 40  # length of the longest bar

Prompts = Annotated[
    int | None,
    typer.Option(
        "--prompts", metavar="N", min=1, help="Number of prompts to sample (default: two steps of prompts, at most 64)."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("preflight")(preflight)


def preflight(recipe: Recipe, overrides: Overrides = None, prompts: Prompts = None, as_json: Json = False) -> None:
    """Sample a few groups from the start model of an rl recipe: reward signal, pass rates, truncation, tokens and run
    time.

    Loads the model, starts the engine and makes one trial update, which is discarded. Nothing is written.
    """
    from posttrain.cli import packages
    from posttrain.cli import preflight as checks
    from posttrain.scratch import scratch

    loaded = checks.load(recipe, overrides or [])
    if loaded.recipe.verb != "rl":
        hint = "for other recipes: `posttrain plan` and `posttrain data audit`"
        raise UserError(f"`preflight` needs an rl recipe; this one is for `posttrain {loaded.recipe.verb}`", hint=hint)
    packages.require(loaded)
    print_notes(loaded)
    from posttrain.run.directory import RunDirectory
    from posttrain.train.preflight import preflight as measure_start

    settings: Any = loaded.recipe
    rollout = settings.rollout
    count = prompts or min(2 * rollout.prompts_per_step, SAMPLE)
    say(f"{count} prompts x {rollout.group_size} completions of {settings.model.path}")
    with (
        scratch("preflight") as folder,
        RunDirectory.open(
            folder / "run", name="preflight", text=json.dumps(loaded.resolved), resolved=loaded.resolved
        ) as directory,
    ):
        report = measure_start(settings, directory, count)
    if as_json:
        print_json(report)
    else:
        show(report)


def show(report: Mapping[str, Any]) -> None:
    """Print the report as text on stdout."""
    signal, lengths, tokens, seconds = (report[key] for key in ("signal", "lengths", "tokens", "seconds"))
    others = (f"{k.removeprefix('signal/')} {v:.0%}" for k, v in signal.items() if k != "signal/share" and v)
    terminal.say(f"groups with a signal: {signal['signal/share']:.0%}  ({', '.join(others) or 'all of them'})")
    right = "" if report["correct"] is None else f"right answers: {report['correct']:.1%}; "
    rewards = "  ".join(f"{name} {_number(mean)}" for name, mean in report["rewards"].items())
    terminal.say(f"{right}mean reward: {_number(report['reward'])}  ({rewards})")
    terminal.say("pass rate of the groups:")
    most = max((groups for _, _, groups in report["pass_rates"]), default=0) or 1
    for low, high, groups in report["pass_rates"]:
        label = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        terminal.say(f"  {label:>12} {'#' * round(BAR_CHARS * groups / most):<{BAR_CHARS}} {groups}")
    terminal.say(
        f"completions: {lengths['mean']:.0f} tokens on average, 95% have {lengths['p95']} or fewer, of "
        f"{lengths['limit']} allowed; {report['cut']:.1%} are cut"
    )
    rounds = f", {report['generation_rounds']:.1f} generation rounds" if report["generation_rounds"] > 1 else ""
    terminal.say(f"a step: {tokens['a_step']:,.0f} tokens, {tokens['sampled_a_step']:,.0f} of them sampled{rounds}")
    terminal.say(f"  {seconds['sampling']:.1f} s to sample and score, {seconds['training']:.1f} s to train")
    limit = " (run.max_minutes ends it before its last step)" if report["cut_by_max_minutes"] else ""
    hours = report["hours"]
    shown = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    terminal.say(f"the run: {report['steps']} steps, {tokens['run']:,.0f} tokens, about {shown}{limit}")
    for line in report["advice"] or ["nothing stands out"]:
        terminal.say(f"-> {line}")
    say("measured on the start model: completion lengths, and the time with them, may change in training")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
