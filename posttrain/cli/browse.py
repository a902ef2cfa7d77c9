"""`posttrain browse`: an HTML page with every completion of an evaluation, or of two evaluations side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain import terminal
from posttrain.errors import count_noun


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("browse")(browse)


def browse(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `posttrain eval` or `generate`.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A second run directory, to compare with the first.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Page to write (default: browse.html in the last run named)."),
    ] = None,
) -> None:
    """Write an offline HTML page to read, filter and search every completion; two runs are shown side by side by
    problem.
    """
    from posttrain.cli.guard import say
    from posttrain.errors import UserError
    from posttrain.report.browse import write_page

    runs = [run] if other is None else [run, other]
    page = output or runs[-1] / "browse.html"
    if page.is_dir():
        raise UserError(f"{page} is a directory", hint="--output names the page's file")
    counts = write_page(runs, page)
    alone = f", {count_noun(counts['only_one_run'], 'problem')} in one run only" if counts["only_one_run"] else ""
    say(f"{count_noun(counts['completions'], 'completion')} of {count_noun(counts['problems'], 'problem')}{alone}")
    terminal.say(str(page))
