"""Keeps report.html and status.json of a run up to date while the run goes on."""

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

EVERY_S = 10.0  # a page is written at most so often while a run goes on
SHARE = 0.02  # and takes at most this share of its time


class LivePage:
    """The report of a run that goes on. A page that cannot be written is told once and stops nothing."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._view: RunView | None = None
        self._next = 0.0  # when it may be written again
        self._told = False

    def on_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A step has left its numbers: write the page if it is time."""
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
        except Exception as error:  # a page is never worth a run
            if not self._told:
                terminal.note(f"{PAGE} is not written: {(str(error).splitlines() or [type(error).__name__])[0]}")
            self._told = True
        now = time.monotonic()
        if self._view is not None and self._view.done:  # the page of the first step does not wait for the one before
            self._next = now + max(EVERY_S, (now - started) / SHARE)


@contextmanager
def keep_report(directory: RunDirectory) -> Iterator[LivePage]:
    """Around a run in its open directory: its status and its page, from the start to the end, whichever way it ends.

    The page is written at the start, after the first step, then every `EVERY_S` seconds at most, and in the end. Of
    several processes, the one that has the directory open writes. Yields the page, for runs that hold others.
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
    """Note the end, if the disk still takes it: the error itself must be told."""
    try:
        status.end(run, error)
    except Exception as failed:
        terminal.note(f"{status.STATUS} is not written: {failed}")
