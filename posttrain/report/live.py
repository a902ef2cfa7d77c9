"""Updates report.html and status.json of a run while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain import terminal
from posttrain.report.page import PAGE, write_report
from posttrain.report.run_view import RunView
from posttrain.run import status
from posttrain.run.directory import RunDirectory

MIN_INTERVAL_S = 10.0  # minimum time between two writes of the page
MAX_TIME_SHARE = 0.02  # maximum share of the run's time spent on writing the page


class LivePage:
    """Report page of a running run. A failed write is reported once and does not stop the run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._view: RunView | None = None
        self._next = 0.0  # earliest time of the next write
        self._reported = False

    def on_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the page after new metric rows if enough time has passed since the last write."""
        if rows and time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Write the page now."""
        started = time.monotonic()
        try:
            if self._view is None:
                self._view = RunView(self.run)
            else:
                self._view.refresh()
            write_report([self._view], self.run / PAGE)
        except Exception as error:  # the page must not stop the run
            if not self._reported:
                terminal.note(f"{PAGE} is not written: {(str(error).splitlines() or [type(error).__name__])[0]}")
            self._reported = True
        now = time.monotonic()
        if self._view is not None and self._view.last_step:  # no delay before the page of the first step
            self._next = now + max(MIN_INTERVAL_S, (now - started) / MAX_TIME_SHARE)


@contextmanager
def keep_report(directory: RunDirectory) -> Iterator[LivePage]:
    """Keep the status and the page of a run up to date until it ends, with or without an error.

    The page is written at the start, after the first step, then at most every `MIN_INTERVAL_S` seconds, and at the end.
    Of several processes, only the one that opened the directory for writing writes. Yields the page, for runs that
    contain other runs.
    """
    page = LivePage(directory.path)
    if directory.follows:
        yield page
        return
    status.begin(directory.path, directory.attempt)
    page.write()
    directory.on_metrics.append(page.on_rows)
    try:
        yield page
    except BaseException as error:
        _record_end(directory.path, error)
        page.write()
        raise
    _record_end(directory.path, None)
    page.write()


def _record_end(run: Path, error: BaseException | None) -> None:
    """Record the end of the run if the disk allows it; a failed write must not replace the run's error."""
    try:
        status.end(run, error)
    except Exception as failed:
        terminal.note(f"{status.STATUS} is not written: {failed}")
