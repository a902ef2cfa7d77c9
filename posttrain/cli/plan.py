"""`posttrain plan`: predicted memory and step time of a recipe, before any weights are loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.run_messages import print_notes
from posttrain.cli.show import print_json
from posttrain.cli.stage import Gpus, Json, Overrides, Recipe
from posttrain.errors import RecipeError, UserError


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("plan")(plan)


MEANING = {
    "flops": "FLOP/s of a GPU, bf16 dense",
    "used": "share of `flops` that an update reaches",
    "memory": "bytes/s of a GPU's memory",
    "nvlink": "bytes/s of a GPU to GPUs of the same machine",
    "link": "bytes/s of a GPU to other machines",
    "link_used": "share of `nvlink` and `link` that collectives reach",
    "gpus_a_node": "GPUs per machine",
    "launch": "host seconds per layer and micro-batch",
    "decode": "engine host seconds per decoding step",
    "decode_row": "engine host seconds per decoding step and row",
    "length": "mean completion length, as a share of max_new_tokens",
    "prompt": "prompt length in tokens, if no tokenizer gives it",
    "gather": "seconds per token to gather rollouts on all ranks",
    "reward": "seconds per step for scoring after the last rollout",
    "engine_tokens": "tokens/s of one engine; 0: computed from the rates above",
}
Gib = Annotated[
    float | None,
    typer.Option("--gpu-gib", metavar="GIB", min=1, help="Memory of each GPU of the planned cluster, in GiB."),
]
Card = Annotated[
    str | None,
    typer.Option("--card", metavar="NAME", help="GPU type of the planned cluster: a100, h100 (default), h200 or b200."),
]
Servers = Annotated[
    str | None,
    typer.Option(
        "--servers", metavar="NxM", help="vLLM servers on separate GPUs: N servers of M GPUs (default: the recipe's)."
    ),
]
Assume = Annotated[
    list[str] | None,
    typer.Option(
        "--assume",
        metavar="KEY=NUMBER",
        help="Override a rate that the prediction assumes: used=0.35, link=25e9, length=0.8, ... Repeatable.",
    ),
]


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Gpus = None,
    gib: Gib = None,
    card: Card = None,
    servers: Servers = None,
    assume: Assume = None,
    as_json: Json = False,
) -> None:
    """Predict memory by phase and batch sizes of an rl, sft, dpo or reward-model recipe, and what to change if it does
    not fit. With --gpu-gib, --card, --servers or --assume also predict the time of a step on such a cluster.

    No weights are loaded: a directory with a config.json is enough. On a machine with a GPU, two micro-batches of an rl
    recipe are run to measure the seconds per update.
    """
    import torch

    from posttrain.recipe.stages import RlRecipe
    from posttrain.train import cluster_plan, memory_plan
    from posttrain.train import plan as planning
    from posttrain.train.library_logging import quiet

    quiet()
    elsewhere = bool(gib or card or servers or assume)
    loaded, refused = _load_recipe(recipe, overrides or [], servers, elsewhere=elsewhere)
    print_notes(loaded)
    machine = memory_plan.Machine.here(gpus)
    rates = None
    if elsewhere:
        name = (card or "h100").lower()
        rates = cluster_plan.rates_of(name, assume or [], compiled=loaded.recipe.model.compile)
        size = int((gib or cluster_plan.CARDS[name][3]) * memory_plan.GIB)
        machine = memory_plan.Machine(
            size, True, f"a GPU of {size / memory_plan.GIB:g} GiB ({name.upper()})", machine.ranks
        )
    report = planning.plan(loaded.recipe, machine, rates)
    if torch.cuda.is_available() and isinstance(loaded.recipe, RlRecipe) and report["fits"] and rates is None:
        from posttrain.train.memory_probe import calibrate

        batch = report["batch"]
        report["measured"] = calibrate(
            loaded.recipe, prompt=batch["longest prompt"], tokens_a_step=batch["tokens a step at most"]
        )
    if as_json:
        print_json({**report, **({"refused": refused} if refused else {})})
        return
    _print_plan(report)
    if rates is not None:
        _print_cluster(report["cluster"])
    elif not torch.cuda.is_available():
        engine = isinstance(loaded.recipe, RlRecipe) and loaded.recipe.rollout.engine == "vllm"
        memory = ", and the engine's memory is a share of the GPU named above" if engine else ""
        say(f"no GPU here: seconds are not measured{memory}")
    if refused:
        say(f"this is a plan only; a run of the recipe would be refused: {refused}")


def _load_recipe(recipe: str, overrides: list[str], servers: str | None, *, elsewhere: bool) -> tuple[Any, str]:
    """Return the recipe, with vLLM servers if `--servers` asks for them, and why a run of it would be refused ("" if
    not). elsewhere: the plan is for another machine.
    """
    from posttrain.cli import preflight
    from posttrain.recipe.engine_sections import Server

    if servers is None:
        loaded = preflight.load(recipe, overrides, without=["gpu"])
        return loaded, "" if elsewhere else _explain_no_run_here(loaded.recipe)
    count, size = _parse_servers(servers)
    urls = [f"http://engine{n}:8100" for n in range(count)]
    added = ["rollout.engine=vllm", f"rollout.vllm.server.urls=[{','.join(urls)}]"]
    try:
        served = [*overrides, *added, f"rollout.vllm.tensor_parallel={size}"]
        return preflight.load(recipe, served, without=["gpu"]), ""
    except RecipeError as error:
        loaded, refused = preflight.load(recipe, overrides, without=["gpu"]), error.problems[0].what
    rollout: Any = getattr(loaded.recipe, "rollout", None)
    if rollout is None:
        raise UserError(f"--servers {servers}: `posttrain {loaded.recipe.verb}` generates nothing", hint="leave it out")
    vllm = rollout.vllm.model_copy(update={"server": Server(urls=urls), "tensor_parallel": size, "sleep": False})
    rollout = rollout.model_copy(update={"engine": "vllm", "vllm": vllm})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"rollout": rollout})), refused


def _explain_no_run_here(recipe: Any) -> str:
    """Return why a run on this machine would be refused for what it lacks; "" if it has everything."""
    from posttrain.cli.existence import check_gpu_needs

    sections = {name: getattr(recipe, name).model_dump() for name in ("model", "optim") if hasattr(recipe, name)}
    found = [(name, *need) for name, values in sections.items() for need in check_gpu_needs(name, values)]
    return "; ".join(f"{name}.{key}: {error.problems[0].what}" for name, key, error in found)


def _parse_servers(text: str) -> tuple[int, int]:
    """Parse `8x2` or `8` to (servers, GPUs per server)."""
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,2}))?", text)
    if not found:
        raise UserError(f"--servers {text}: not servers x GPUs of each", allowed="8x2, or 8 for servers of one GPU")
    return int(found[1]), int(found[2] or 1)


def _print_cluster(found: dict[str, Any]) -> None:
    """Print the time of a step, its longest part, other cluster sizes, possible changes, and all assumed rates."""
    engines = found["engines"]
    where = f", {engines['count']} engines of {engines['gpus_each']} GPUs" if engines.get("apart") else ""
    terminal.say(f"\npredicted seconds of a step on {found['training_gpus']} training GPUs{where}")
    width = max(map(len, found["seconds"]))
    for part, seconds in found["seconds"].items():
        bound = "  <- the longest part" if part == found["slowest"] else ""
        terminal.say(f"  {part:{width}}{seconds:>10.1f}{bound}")
    terminal.say(f"{found['tokens_a_second']:,} tokens/s")
    terminal.say(f"network a step: {found['network_gib_a_rank']} GiB to each training GPU", end="")
    terminal.say(f", {found['network_gib_to_engines']} GiB to the engines" if engines else "")
    if not found["engine_holds_weights"]:
        terminal.say(f"the model does NOT fit into an engine of {engines['gpus_each']} GPUs: use more GPUs per engine")
    if engines:
        terminal.say(
            f"the longest completion alone takes {found['longest_completion_s']} s: more engines cannot be faster"
        )
    for scaled_plan in found["scaled"]:
        terminal.say(
            f"  {scaled_plan['gpus']:>6} GPUs{scaled_plan['step_s']:>10.1f} s a step, longest: {scaled_plan['slowest']}"
        )
    if found["saturates_at"]:
        terminal.say(
            f"above {found['saturates_at']} GPUs, doubling their number is less than 1.3 times as fast with this batch"
        )
    if found["changes"]:
        terminal.say("each of these changes, alone, makes a step take")
    for change in found["changes"]:
        terminal.say(f"  {change['change']:40} {change['step_s']} s")
    terminal.say("assumed rates (--assume KEY=NUMBER overrides one)")
    width = max(map(len, found["assumed"]))
    for key, value in found["assumed"].items():
        terminal.say(f"  {key:{width}}{value:>10g}  {MEANING[key]}")


def _print_plan(found: dict[str, Any]) -> None:
    """Print text for people: batch sizes, memory by phase, possible changes."""
    from posttrain.train.plan import SHOWN_GIB

    trained = found["trained"] / found["parameters"]
    each = f", each of {found['ranks']}" if found["ranks"] > 1 else ""
    terminal.say(
        f"{found['parameters'] / 1e6:.1f}M parameters, {trained:.1%} of that number trained; "
        f"on {found['machine']}{each}\n"
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
    else:
        terminal.say(f"no change of one setting lowers the peak by {SHOWN_GIB} GiB or more")
    for edit in found["edits"]:
        terminal.say(f"  {edit['change']:40} {edit['peak_gib']} GiB")
    for name, number in found.get("measured", {}).items():
        terminal.say(f"measured {name}: {number:.2f}")
