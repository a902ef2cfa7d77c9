"""`posttrain data`: inspect rows as the model sees them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli import data_audit
from posttrain.cli.help import App
from posttrain.cli.show import print_json
from posttrain.errors import DataError, UserError, count_noun

if TYPE_CHECKING:
    from rich.console import Console

app = App()


@app.callback()
def root() -> None:
    """Inspect rows as the model sees them, and check whether they are fit to train on."""


data_audit.register(app)


@app.command()
def inspect(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe; --rollouts needs none."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Recipe keys to override, e.g. data.size=100.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, metavar="N", help="Number of rows to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    rollouts: Annotated[
        Path | None,
        typer.Option("--rollouts", metavar="RUN", help="Show the newest saved rollouts of this rl run instead."),
    ] = None,
    with_model: Annotated[
        bool, typer.Option("--with-model", help="Load the model, for sft objectives whose token weights depend on it.")
    ] = False,
) -> None:
    """Show rendered rows with the training mask of every token, token lengths, and which rows were dropped or cut, and
    why.

    Needs the tokenizer only, not the model's weights (except with --with-model, which shows the token weights before
    the first step). Trained text is green on a terminal and between » and « elsewhere. Exit code 1 if a check says
    LOOK. With --rollouts: which tokens of a run's samples the model wrote (they carry loss) and which a tool or an
    environment wrote.
    """
    from posttrain.run.resolved_recipe import read_resolved

    if rollouts is not None:
        read_resolved(rollouts, "rl")
    if recipe is not None:
        with _drop_inspect_hint():
            _inspect_recipe(recipe, overrides or [], rows, as_json, rollouts, with_model)
    elif rollouts is not None:
        _show_rollouts(rollouts, _load_tokenizer_of_run(rollouts), rows, as_json)
    else:
        raise UserError("no rows are named", hint="name a recipe, or an rl run after --rollouts")


@contextlib.contextmanager
def _drop_inspect_hint() -> Iterator[None]:
    """Remove hints to run `posttrain data inspect` from errors: the user is running it."""
    try:
        yield
    except DataError as error:
        hints = {p: "" if "posttrain data inspect" in p.hint else p.hint for p in error.problems}
        raise DataError.of([replace(p, hint=hint) for p, hint in hints.items()]) from error


def _inspect_recipe(
    name: str, overrides: Sequence[str], rows: int, as_json: bool, rollouts: Path | None, with_model: bool
) -> None:
    """Print the report on a recipe's rows, or a run's rollouts decoded with the recipe's tokenizer."""
    from posttrain.cli import packages, preflight
    from posttrain.data import inspect as looking

    checked = preflight.load(name, overrides, without=["run", "gpu"])
    recipe: Any = checked.recipe
    stage = recipe.verb
    if stage == "reward-model":  # it reads pairs like dpo, or labeled answers like sft
        stage = "dpo" if recipe.objective.pairs else "sft"
    looking.check_stage(stage)
    packages.require(checked, packages.is_for_tokens)
    from posttrain.models.load import load_eos_ids, load_image_reader, load_tokenizer, read_gguf_once

    with read_gguf_once(recipe.model, recipe.base_dir):
        tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
        eos_ids = load_eos_ids(recipe.model, recipe.base_dir, tokenizer)
        reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    if rollouts is not None:
        _show_rollouts(rollouts, tokenizer, rows, as_json)
        return
    is_dpo = recipe.verb == "dpo"
    report = looking.inspect(
        stage,
        recipe.data,
        tokenizer,
        recipe.base_dir,
        eos_ids,
        rows,
        _make_token_weights(recipe, tokenizer, with_model),
        single=is_dpo and "labels" in recipe.loss.needs,
        rules=recipe.pairs if is_dpo else None,
        reader=reader,
    )
    if recipe.verb == "rl" and recipe.sampler.use != "uniform":
        report = {**report, "sampler": _describe_first_step(recipe, tokenizer, reader)}
    if recipe.verb == "rl":
        from posttrain.train.shown_data import add_answers, add_replay, add_shape, add_variants, add_workflow

        add_replay(report, recipe)
        add_answers(report, recipe)
        add_shape(report, recipe, tokenizer)
        add_variants(report, recipe, tokenizer)
        add_workflow(report, recipe, tokenizer)
    if as_json:
        print_json(report)
    else:
        show(report)
    data_audit.end_with_findings(report["checks"], as_json=as_json)


def _describe_first_step(recipe: Any, tokenizer: Any, reader: Any) -> dict[str, Any]:
    """Return the prompts that the recipe's sampler selects for the first step."""
    from posttrain.data.prepare import prepare_prompts
    from posttrain.train.assemble import total_steps
    from posttrain.train.prompt_sampler import describe_first_step

    prompts = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, reader=reader).items
    return describe_first_step(recipe, prompts, total_steps(recipe, len(prompts)))


@app.command("pairs", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def refuse_moved_pairs() -> None:
    """Refuse the former command `data pairs` and name its successor, `posttrain pairs`."""
    raise UserError(
        "preference pairs are made by `posttrain pairs`, from a recipe",
        hint="write `stage: pairs` and `completions: EVAL_RUN` into pairs.yaml, then `posttrain pairs pairs.yaml`. "
        "The builder and what bounds the pairs are keys: `posttrain recipe keys pairs`",
    )


def _make_token_weights(recipe: Any, tokenizer: Any, with_model: bool) -> Any:
    """Return the function that computes the token weights of an example; None if the objective weights all tokens
    equally.
    """
    if recipe.verb != "sft" or recipe.objective.use == "ce":
        if with_model:
            raise UserError("--with-model: no token weights of this recipe depend on the model", hint="leave it out")
        return None
    from posttrain.train.sft_objective import example_weights

    found = example_weights(recipe, tokenizer, with_model=with_model)
    if found is None:
        terminal.note(f"token weights of {recipe.objective.use} depend on the model: --with-model shows them")
    return found


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the report as text and tables on stdout."""

    console = console or terminal.console(highlight=False)
    for sample in report["samples"]:
        _show_sample(console, sample)
    counts = f"{count_noun(report['rows'], 'row')}, {report['items']} kept"
    share = f", {report['trained_ratio']:.1%} of their tokens trained on" if report["trained_ratio"] else ""
    console.print(f"{report['stage']}: {counts}{share}\n", markup=False)
    _show_lengths(console, report["lengths"])
    _show_causes(console, report)
    for check in report["checks"]:
        mark, style = ("ok  ", "green") if check["ok"] else ("LOOK", "bold yellow")
        console.print(f"[{style}]{mark}[/]", end=" ")
        console.print(f"{check['name']}: {check['text']}", markup=False, soft_wrap=True)
    if "sampler" in report:
        _show_sampler(console, report["sampler"])
    if "columns" in report:
        console.print(f"columns for rewards: {', '.join(report['columns'])}", markup=False, soft_wrap=True)


def _show_sampler(console: Console, first: Mapping[str, Any]) -> None:
    from posttrain import source_locations

    sizes = sorted(set(first["rollouts"]))
    each = f"{sizes[0]} rollouts each" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} rollouts each"
    drawn = source_locations.describe_rows(first["rows"])
    text = f"sampler {first['sampler']}: step 1 draws {drawn}; {first['note'] or each}"
    console.print(text, markup=False, soft_wrap=True)


def _load_tokenizer_of_run(run: Path) -> Any:
    """Load the tokenizer that a run saved with its model. Raises UserError if the run has saved none yet."""
    from posttrain.models.load import load_tokenizer
    from posttrain.recipe.sections import Model
    from posttrain.run import checkpoints

    saved = [run / "final", checkpoints.latest(run / "checkpoints")]
    for folder in saved:
        if folder is not None and (folder / "tokenizer_config.json").is_file():
            return load_tokenizer(Model(path=str(folder)), run)
    raise UserError(
        f"{run} has saved no model yet, and its tokenizer is needed to decode its tokens",
        hint="name its recipe as well: posttrain data inspect RECIPE --rollouts RUN",
    )


def _show_rollouts(run: Path, tokenizer: Any, count: int, as_json: bool) -> None:
    """Print the newest saved rollouts of a run, with the tokens that carry loss marked."""
    from posttrain.data.inspect import sampled_parts
    from posttrain.run.jsonl import read_rows

    records = [r for r in read_rows(run / "samples.jsonl") if r.get("segments")]
    if not records:
        hint = "`run.samples_per_step` says how many are written at the end of each step"
        raise UserError(f"{run} holds no sampled rollouts yet", hint=hint)
    newest = [r for r in records if r["step"] == records[-1]["step"]][:count]
    samples = [sampled_parts(record, tokenizer) for record in newest]
    if as_json:
        print_json(samples)
        return
    console = terminal.console(highlight=False)
    for sample in samples:
        _show_sample(console, sample)
    console.print(f"step {records[-1]['step']}: {len(samples)} of the rollouts in samples.jsonl")


def _show_sample(console: Console, sample: Mapping[str, Any]) -> None:
    """Print one rendered row, with trained text marked."""
    from rich.text import Text

    from posttrain import source_locations

    colored = console.color_system is not None and not console.no_color
    console.rule(source_locations.describe_row(sample["uid"]), align="left", characters="-", style="dim")
    for name, part in sample["parts"].items():
        text = Text()
        if len(sample["parts"]) > 1:
            text.append(f"{name}: ", style="bold")
        for run in part["runs"]:
            written = _REPEATED.sub(_count_repeats, _mark_line_ends(run["text"]))
            trained = run["fate"] == "trained"
            marked = f"»{written}«" if trained and not colored else written
            if trained and run.get("weight", 1.0) != 1.0:
                marked += f"[x{run['weight']:.3g}]"
            text.append(marked, style="green" if trained else "dim")
        console.print(text, soft_wrap=True)
        tokens = count_noun(len(part["tokens"]), "token")
        count = sum(t["fate"] == "trained" for t in part["tokens"])
        whole = [*sample["parts"]] == ["prompt"]  # of a stage that samples completions
        shown = f"prompt of {tokens}; the model writes the rest" if whole else f"{tokens}, {count} trained on"
        console.print(Text(f"({shown})\n", style="dim"))
    for image in sample.get("images", ()):
        size = f"{image['width']} x {image['height']} pixels, {count_noun(image['tokens'], 'token')}"
        console.print(Text(f"{image['source']}: {size}", style="dim"), soft_wrap=True)


_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")


def _count_repeats(match: re.Match[str]) -> str:
    """Return a repeated token, as images have, as the token and its count."""
    return f"{match[1]} x{len(match[0]) // len(match[1])}"


def _mark_line_ends(text: str) -> str:
    """Return the text with its line ends marked, so that trained line ends can be seen."""
    return text.replace("\n", "⏎\n")


def _show_lengths(console: Console, lengths: Mapping[str, Mapping[str, int]]) -> None:
    heads = ("min", "median", "p95", "max")
    _print_table(console, ("tokens", *heads), [(part, *(str(s[h]) for h in heads)) for part, s in lengths.items()])


def _show_causes(console: Console, report: Mapping[str, Any]) -> None:
    """Print which rows were dropped, cut or noted, by cause."""
    from posttrain import source_locations

    causes = [
        (fate, cause, str(len(uids)), source_locations.describe_rows(uids))
        for fate in ("dropped", "cut", "noted")
        for cause, uids in report[fate].items()
    ]
    if causes:
        _print_table(console, ("fate", "cause", "rows", "which"), causes)
    else:
        console.print("no row was dropped or cut\n")


def _print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
