"""`posttrain plan`: what a recipe will need, before anything is loaded."""

from __future__ import annotations

from typing import Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.run_messages import tell_notes
from posttrain.cli.show import print_json
from posttrain.cli.stage import Gpus, Json, Overrides, Recipe


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("plan")(plan)


def plan(recipe: Recipe, overrides: Overrides = None, gpus: Gpus = None, as_json: Json = False) -> None:
    """Memory by phase, batch arithmetic, and what to change if it does not fit; for rl, sft, dpo and reward-model
    recipes.

    No weights are loaded. Where there is a GPU, two micro-batches of an rl recipe are run for its seconds an update.
    """
    from posttrain.cli import preflight

    loaded = preflight.load(recipe, overrides or [])
    tell_notes(loaded)

    import torch

    from posttrain.recipe.stages import RlRecipe
    from posttrain.train import memory_plan
    from posttrain.train import plan as planning
    from posttrain.train.library_logging import quiet

    quiet()
    found = planning.plan(loaded.recipe, memory_plan.Machine.here(gpus))
    if torch.cuda.is_available() and isinstance(loaded.recipe, RlRecipe) and found["fits"]:
        from posttrain.train.calibrate import calibrate

        batch = found["batch"]
        found["measured"] = calibrate(
            loaded.recipe, prompt=batch["longest prompt"], tokens_a_step=batch["tokens a step at most"]
        )
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not torch.cuda.is_available():
        say("no GPU here: seconds are not measured, and the engine's share is that of the card named above")


def _print(found: dict[str, Any]) -> None:
    """Text for people: arithmetic, memory by phase, changes."""
    trained = found["trained"] / found["parameters"]
    each = f", each of {found['ranks']}" if found["ranks"] > 1 else ""
    terminal.say(
        f"{found['parameters'] / 1e6:.1f}M parameters, {trained:.1%} as many are trained; on {found['machine']}{each}\n"
    )
    width = max(map(len, found["batch"]))
    for name, number in found["batch"].items():
        terminal.say(f"  {name:{width}}{number:>12,}")
    terminal.say("\npredicted memory in GiB")
    phases = found["memory_gib"]
    terminal.say(f"  {'':28}" + "".join(f"{phase:>10}" for phase in phases))
    for part in dict.fromkeys(part for parts in phases.values() for part in parts if part != "sum"):
        cells = (f"{parts[part]:>10.2f}" if part in parts else f"{'':10}" for parts in phases.values())
        terminal.say(f"  {part:28}" + "".join(cells))
    terminal.say(f"  {'sum':28}" + "".join(f"{parts['sum']:>10.2f}" for parts in phases.values()))
    for part, size in found["host_gib"].items():
        terminal.say(f"  {part + ' (host)':28}{size:>10.2f}")
    verdict = "fits" if found["fits"] else "does NOT fit"
    terminal.say(f"\npeak {found['peak_gib']} GiB in `{found['peak_phase']}`: {verdict} in {found['card_gib']} GiB")
    if found["elsewhere"]:
        each, count = found["elsewhere"]["gib_each"], found["elsewhere"]["servers"]
        gpus = found["elsewhere"]["gpus_each"]
        cards = f" of {gpus} GPUs, {each} GiB on each of them," if gpus > 1 else f", {each} GiB each"
        terminal.say(f"vLLM runs elsewhere: {count} server{'s' * (count > 1)}{cards} on a card like this one")
    if found["edits"]:
        terminal.say("each of these changes, alone, lowers the peak to")
    for edit in found["edits"]:
        terminal.say(f"  {edit['change']:40} {edit['peak_gib']} GiB")
    for name, number in found.get("measured", {}).items():
        terminal.say(f"measured {name}: {number:.2f}")
