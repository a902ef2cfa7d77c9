"""`posttrain data inspect`: rows as the model sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="See rows as the model sees them, token by token.",
)


@app.callback()
def root() -> None:
    """See rows as the model sees them, token by token."""


@app.command()
def inspect(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values to change.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, metavar="N", help="Rows to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Rendered rows with every token's fate, lengths, and what was dropped or cut, by cause.

    Needs the tokenizer only, no weights. Trained text is green on a terminal and stands between » and « elsewhere.
    """
    from posttrain.data.inspect import check_stage
    from posttrain.data.inspect import inspect as look
    from posttrain.models.load import load_eos_ids, load_tokenizer
    from posttrain.recipe.load import load

    loaded = load(recipe, overrides or []).recipe
    check_stage(loaded.verb)
    section: Any = loaded
    tokenizer = load_tokenizer(section.model, loaded.base_dir)
    eos_ids = load_eos_ids(section.model, loaded.base_dir, tokenizer)
    report = look(loaded.verb, section.data, tokenizer, loaded.base_dir, eos_ids, rows)
    if as_json:
        from posttrain.cli.show import print_json

        print_json(report)
        return
    show(report)


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The report as text and tables on stdout."""
    from rich.console import Console

    console = console or Console(highlight=False)
    for sample in report["samples"]:
        _show_sample(console, sample)
    counts = f"{report['rows']} rows, {report['items']} kept"
    share = f", {report['trained_ratio']:.1%} of their tokens trained on" if report["trained_ratio"] else ""
    console.print(f"{report['stage']}: {counts}{share}\n", markup=False)
    _show_lengths(console, report["lengths"])
    _show_causes(console, report)
    for check in report["checks"]:
        mark, style = ("ok  ", "green") if check["ok"] else ("LOOK", "bold yellow")
        console.print(f"[{style}]{mark}[/]", end=" ")
        console.print(f"{check['name']}: {check['text']}", markup=False, soft_wrap=True)
    if "columns" in report:
        console.print(f"columns for rewards: {', '.join(report['columns'])}", markup=False, soft_wrap=True)


def _show_sample(console: Console, sample: Mapping[str, Any]) -> None:
    from rich.text import Text

    coloured = console.color_system is not None and not console.no_color
    console.rule(f"row {sample['uid']}", align="left", characters="-", style="dim")
    for name, part in sample["parts"].items():
        text = Text()
        if len(sample["parts"]) > 1:
            text.append(f"{name}: ", style="bold")
        for run in part["runs"]:
            written = _visible(run["text"])
            trained = run["fate"] == "trained"
            marked = f"»{written}«" if trained and not coloured else written
            text.append(marked, style="green" if trained else "dim")
        console.print(text, soft_wrap=True)
        count = sum(t["fate"] == "trained" for t in part["tokens"])
        console.print(Text(f"({len(part['tokens'])} tokens, {count} trained on)\n", style="dim"))


def _visible(text: str) -> str:
    """Line ends shown, so that one that is trained on can be seen."""
    return text.replace("\n", "⏎\n")


def _show_lengths(console: Console, lengths: Mapping[str, Mapping[str, int]]) -> None:
    heads = ("min", "median", "p95", "max")
    _table(console, ("tokens", *heads), [(part, *(str(s[h]) for h in heads)) for part, s in lengths.items()])


def _show_causes(console: Console, report: Mapping[str, Any]) -> None:
    found = [
        (fate, cause, str(len(uids)), ", ".join(uids[:3]) + (" ..." if len(uids) > 3 else ""))
        for fate in ("dropped", "cut")
        for cause, uids in report[fate].items()
    ]
    if found:
        _table(console, ("fate", "cause", "rows", "which"), found)
    else:
        console.print("no row was dropped or cut\n")


def _table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
