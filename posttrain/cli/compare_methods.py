"""`posttrain compare-methods`: other methods computed on the rollouts that a run has saved. No GPU, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.show import print_json
from posttrain.cli.stage import Json
from posttrain.errors import count_noun

COLUMNS = {
    "rows kept": "rows that stay after the method's filters, of all rows",
    "rows pushed": "rows with a gradient on at least one token",
    "mean |A|": "mean absolute advantage of the kept rows",
    "on right rows": "share of the absolute gradient that is on right rows",
    "longest quarter": "share of the absolute gradient that is on the longest quarter of the rows",
    "clipped": "share of the trained tokens whose ratio is clipped (- if the loss has no clip)",
    "like the run": "cosine between this gradient and that of the run's own method (1: same direction; -: one is zero)",
}
ROW_COLUMNS = {
    "METHOD: A": "advantage of the row, mean over its tokens (- if the row is not kept)",
    "METHOD: push": "sum over its tokens of -d loss / d log-prob: above 0 the row becomes more likely",
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("compare-methods")(compare_methods)


def compare_methods(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of an `rl` run.")],
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="A,B,C", help="Presets to compare, comma-separated.")
    ],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Step whose saved rollouts are used (default: newest).")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Also show the first N rollouts one by one.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare what other methods compute from a run's saved rollouts: rows used, advantages, loss gradients by token,
    clipping.

    Nothing is generated and no model is loaded: rewards, lengths and log-probs are those that the run saved
    (run.keep_rollouts). With one update per step the policy equals the sampling policy, and nothing can be clipped.
    The gradient is that of the loss by the log-prob of each token. `as it was` is the run's own method; the columns are
    explained below the table.
    """
    from posttrain.run.resolved_recipe import read_resolved

    resolved = read_resolved(run, "rl")
    names = list(dict.fromkeys(name.strip() for name in algorithm.split(",") if name.strip()))

    from posttrain.train import saved_rollouts
    from posttrain.train.compare_methods import compare, summarize, tabulate_rows

    saved = saved_rollouts.read(run, step)
    outcomes = compare(resolved, saved, names)
    table = summarize(outcomes, saved.batch)
    single = tabulate_rows(outcomes, saved.batch)
    if as_json:
        print_json({"step": saved.batch.step + 1, "methods": table, "rows": single})
        return
    _print_table(table)
    if rows:
        terminal.say()
        _print_table(single[:rows])
    explained = {**COLUMNS, **(ROW_COLUMNS if rows else {})}
    say("\n".join(f"{name:<{max(map(len, explained))}}  {meaning}" for name, meaning in explained.items()))
    tokens = count_noun(int(saved.batch.mask.sum()), "token")
    say(f"rollouts of step {saved.batch.step + 1}: {count_noun(len(saved.batch), 'row')}, {tokens}")


def _print_table(table: list[dict[str, Any]]) -> None:
    """Print columns of text; numbers with three digits."""
    columns = list(dict.fromkeys(key for row in table for key in row if key != "note"))
    cells = [columns, *([_format_value(row.get(key)) for key in columns] for row in table)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    notes = ["", *(row.get("note", "") for row in table)]
    for line, note in zip(cells, notes, strict=True):
        if note:
            terminal.say(f"{line[0]:<{widths[0]}}  {note}")
        else:
            rest = "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
            terminal.say(f"{line[0]:<{widths[0]}}  {rest}".rstrip())


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
