"""Start of the tracker process with the run, and a bounded wait for it at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from posttrain import terminal
from posttrain.errors import count_noun
from posttrain.run.directory import RunDirectory

WAIT_S = 60.0  # for unsent rows after the run has ended
# Variables that the tracker process does not inherit: it is not a rank
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOG, PROBLEMS = "track.log", "track-problems.txt"


@contextmanager
def track_run(trackers: Sequence[Any], directory: RunDirectory) -> Iterator[None]:
    """Run a tracker process that sends this run's rows to the trackers of the recipe.

    The process has its own session, so that Ctrl-C does not reach it, and exits after the run has ended. Its messages
    are printed here, each line once. Of several processes of a run, only the one that writes starts it.
    """
    if not trackers or directory.follows:
        yield
        return
    printed: list[str] = []

    def print_new_lines(_: Sequence[Mapping[str, Any]] = ()) -> None:
        path = directory.logs / PROBLEMS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for line in lines[len(printed) :]:
            terminal.note(line)
        printed[:] = lines

    process = _start_tracker(directory)
    directory.on_metrics.append(print_new_lines)
    try:
        yield
    finally:
        if process is not None:
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                names = count_noun(len(trackers), "tracker")
                terminal.note(
                    f"{names} still sending, in a process that ends by itself; its log: {directory.logs / LOG}"
                )
        print_new_lines()


def _start_tracker(directory: RunDirectory) -> subprocess.Popen[bytes] | None:
    """Start the process and return it; report a failure and return None."""
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    command = [sys.executable, "-m", "posttrain", "track", str(directory.path.absolute())]
    try:
        with (directory.logs / LOG).open("ab") as log:
            problems = str((directory.logs / PROBLEMS).absolute())
            return subprocess.Popen(
                [*command, "--attempt", str(directory.attempt), "--problems", problems], env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        terminal.note(f"the trackers could not be started, and the run goes on without them: {error}")
        return None
