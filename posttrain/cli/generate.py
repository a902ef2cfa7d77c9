"""`posttrain generate`: completions of a recipe's prompts, or of prompts given on the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import DEBUG, say
from posttrain.cli.run_messages import print_notes, print_run_summary
from posttrain.cli.stage import AllowChanged, Debug, DryRun, Json, Output, Overrides, Resume, execute, print_preview
from posttrain.errors import Interrupted, UserError, count_noun

Source = Annotated[
    str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe file or shipped recipe; with --prompt, a model.")
]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A user message to complete; repeatable.")
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="An image attached to each --prompt; repeatable."),
]
Count = Annotated[
    int, typer.Option("-n", "--samples", metavar="N", min=1, help="Completions per prompt (with --prompt).")
]
Limit = Annotated[
    int,
    typer.Option("--max-new-tokens", metavar="N", min=1, help="Maximum tokens of a completion (with --prompt)."),
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", metavar="T", min=0.0, help="Sampling temperature; 0 = greedy (with --prompt)."),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Sampling seed: equal seeds, equal completions (with --prompt).")
]

RECIPE_KEYS = {  # option that goes with --prompt -> the recipe key of the same setting
    "samples": "samples",
    "max_new_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "seed": "run.seed",
}


def register(app: typer.Typer) -> None:
    """Add `generate` to the command line."""
    app.command("generate")(generate)


def generate(
    ctx: typer.Context,
    source: Source,
    overrides: Overrides = None,
    prompt: Prompts = None,
    image: Images = None,
    samples: Count = 1,
    max_new_tokens: Limit = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dry_run: DryRun = False,
    resume: Resume = False,
    allow_changed: AllowChanged = False,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate completions of a recipe's prompts, or of prompts given as `posttrain generate MODEL --prompt "..."`.

    -n, --max-new-tokens, --temperature, --seed and --image apply to --prompt only; with --prompt, overrides are those
    of a generate recipe. A recipe sets the same values by its keys.
    """
    from posttrain.cli import packages, preflight

    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
    if prompt:
        _refuse_with_prompt(
            {"--resume": resume, "--allow-changed": allow_changed, "--output": output, "--dry-run": dry_run}
        )
        if samples > 1 and temperature == 0:
            raise UserError("-n above 1 needs a --temperature above 0: greedy completions are all the same")
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        values = {"samples": samples, "sampling": sampling, "run": {"seed": seed}}
        complete_prompts(source, prompt, values, overrides or [], as_json, images=image or [])
        return
    if image:
        raise UserError("--image goes with --prompt", hint="rows of a recipe name their own in a column `images`")
    _refuse_without_prompt(ctx, source)
    loaded = preflight.load(source, overrides or [], stage="generate")
    if dry_run:
        print_preview(loaded, output, as_json)
        return
    packages.require(loaded)
    typed = ["posttrain", "generate", source, *(overrides or [])]
    summary, path = execute(ctx, loaded, output, resume, typed, allow_changed=allow_changed)
    print_run_summary(summary, path, as_json)


def _refuse_with_prompt(given: Mapping[str, object]) -> None:
    """Raise UserError for options that need a recipe. given: option -> its value."""
    for option in (name for name, value in given.items() if value):
        keep = "; redirect the output to save them: > FILE (with --json, one per line)" if option == "--output" else ""
        raise UserError(f"{option} is for recipes; completions of --prompt are printed and not saved{keep}")


def _refuse_without_prompt(ctx: typer.Context, source: str) -> None:
    """Raise UserError for a model without a prompt, and for a recipe with options that need --prompt."""
    if source in ("tiny", "tiny-vision") or Path(source).expanduser().is_dir():
        hint = f'posttrain generate {shlex.quote(source)} --prompt "..."'
        raise UserError(f"`{source}` is a model, and no prompt is given", hint=hint)
    for name, key in RECIPE_KEYS.items():
        given = ctx.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE":
            option = "-n" if name == "samples" else f"--{name.replace('_', '-')}"
            raise UserError(f"{option} goes with --prompt", hint=f"with a recipe write {key}=...")


def complete_prompts(
    model: str,
    prompts: Sequence[str],
    values: dict[str, Any],
    overrides: list[str],
    as_json: bool,
    images: Sequence[Path] = (),
) -> None:
    """Complete prompts, each with the images attached, and print the texts (or JSON lines). Nothing is saved."""
    from posttrain.cli import packages, preflight
    from posttrain.recipe.load import load_dict
    from posttrain.scratch import scratch

    with scratch("generate") as folder:
        rows = folder / "prompts.jsonl"
        shown = {"images": [str(path.expanduser().absolute()) for path in images]} if images else {}
        asked_for = [{"prompt": prompt, **shown} for prompt in prompts]
        rows.write_text("".join(json.dumps(row) + "\n" for row in asked_for), encoding="utf-8")
        recipe = {"stage": "generate", "model": {"path": model}, "data": {"source": str(rows)}, **values}
        loaded = load_dict(recipe, base_dir=Path.cwd(), where="command line", overrides=overrides)
        preflight.check(loaded)
        packages.require(loaded)
        print_notes(loaded)
        from posttrain.pipeline import run_stage
        from posttrain.run.directory import RunDirectory

        run = folder / "run"
        with RunDirectory.open(run, name="generate", text=json.dumps(recipe), resolved=loaded.resolved) as directory:
            try:
                summary = run_stage(loaded.recipe, directory)
            except Interrupted as stopped:
                number = stopped.exit_code - 128
                raise Interrupted("stopped; completions of --prompt are not saved", hint="", number=number) from stopped
        written = summary.get("best", summary["completions"])
        lines = Path(written).read_text(encoding="utf-8").splitlines()
        asked = [json.loads(line)["prompt"] for line in (run / "problems.jsonl").read_text("utf-8").splitlines()]
    records = [json.loads(line) for line in lines]
    terminal.say("\n".join(lines) if as_json else "\n\n".join(format_completions(records, asked)))
    if cut := [record["tokens"] for record in records if record.get("finish") == "length"]:
        which = "" if len(records) == 1 else f"{len(cut)} of {len(records)} completions "
        say(f"{which}cut after {count_noun(max(cut), 'token')} by --max-new-tokens or the model's context window")


def format_completions(records: Sequence[dict[str, Any]], prompts: Sequence[str | list[dict[str, Any]]]) -> list[str]:
    """Return completions as printed: each below its prompt if there are several prompts, numbered if there are several
    samples.

    records: in any order; prompts: of problem 0, 1, ..., as text, or as messages, whose contents are printed.
    """
    if len(prompts) == 1 and len(records) == 1:
        return [records[0]["completion"]]
    several = any(record["sample"] for record in records)
    records = sorted(records, key=lambda record: (record["problem"], record["sample"]))

    def head(record: dict[str, Any]) -> str:
        number = f" [{record['sample'] + 1}]" if several else ""
        asked = prompts[record["problem"]] if len(prompts) > 1 else ""
        prompt = asked if isinstance(asked, str) else "\n".join(str(message.get("content")) for message in asked)
        return f"> {prompt}{number}".replace("\n", "\n> ") if prompt else f">{number}"

    return [f"{head(record)}\n{record['completion']}" for record in records]
