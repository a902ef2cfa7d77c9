"""Messages around a run: settings without effect before it, its summary and paths after it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.guard import say

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded


def print_notes(loaded: Loaded) -> None:
    """Print notes on recipe settings without effect to stderr, on rank 0 only."""
    from posttrain.run import ranks

    for note in loaded.notes if ranks.is_main() else ():
        say(f"note: {note}")


def print_run_summary(summary: dict[str, Any], path: Path, as_json: bool) -> None:
    """Print a finished run's summary on stdout and its directory on stderr, on rank 0 only."""
    from posttrain.run import ranks

    if not ranks.is_main():
        return
    from posttrain.cli.show import print_summary

    try:
        print_summary(summary, as_json)
    except OSError as error:  # stdout is a closed pipe or a full disk
        if as_json:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"the run is complete; its summary cannot be written to stdout: {error.strerror}")
    say(f"run directory: {path}")
    if (path / "report.html").is_file():
        say(f"report:        {path / 'report.html'}")
