"""Capture of what rewards and tools print during a run: the output goes to a log file instead of the progress display.

Workers write into pipes that threads of this process read, so the log size is limited and the last lines of a worker
that dies are available for its error message.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from posttrain import terminal

MAX_LOG_BYTES = 10 << 20  # maximum log size; later output is read and dropped
LAST_LINES = 10  # last lines to keep of a worker that dies
SHOWN = 100  # maximum characters of the first line and of each last line


class OutputLog:
    """Log file for the workers of one pool.

    tell: called once with a line for the user, at the first output. what: who prints, `rewards` or `tools`; the log is
    `folder/WHAT.log`, on ranks above 0 `folder/WHAT-rankN.log`.
    """

    def __init__(self, folder: Path, what: str, tell: Callable[[str], None], most: int = MAX_LOG_BYTES) -> None:
        rank = int(os.environ.get("RANK", "0"))  # set by torchrun
        self.path = folder / (f"{what}-rank{rank}.log" if rank else f"{what}.log")
        self._what, self._tell, self._left = what, tell, most
        self._user_told = False
        self._lock = threading.Lock()

    def add(self, lines: bytes) -> None:
        """Append complete lines of one worker. A full disk loses log lines but does not stop the run."""
        with self._lock:
            already_told, self._user_told = self._user_told, True
            if self._left > 0:
                cut = lines if len(lines) <= self._left else lines[: self._left] + b"\n... the rest is left out\n"
                self._left -= len(lines)
                with contextlib.suppress(OSError):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with self.path.open("ab") as log:
                        log.write(cut)
        if not already_told:
            first = lines.decode(errors="replace").strip().partition("\n")[0][:SHOWN]
            self._tell(f"{self._what} print ({first}): see {self.path}")


class StderrOutput:
    """Replacement for a log that writes to stderr, escaped because output may contain a completion."""

    def add(self, lines: bytes) -> None:
        """Write complete lines of one worker."""
        terminal.note(lines.decode(errors="replace").removesuffix("\n"))


class OutputReader:
    """Reader of one worker's output.

    `fd` is the write end for the worker, valid until `close_write_end`; `last` returns the latest lines.
    """

    def __init__(self, output_log: OutputLog | StderrOutput) -> None:
        self._log, self._lines = output_log, deque[bytes](maxlen=LAST_LINES)
        self._read, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._read_pipe, name="printed", daemon=True)

    def close_write_end(self) -> None:
        """Close this process's write end after the worker has inherited its own, and start reading."""
        os.close(self.fd)
        self._thread.start()

    def last(self, patience: float = 1.0) -> str:
        """Return the latest lines after the worker has ended.

        Waits at most `patience` seconds, because a child of the worker may hold the pipe open.
        """
        self._thread.join(patience)
        return "\n".join(line.decode(errors="replace")[:SHOWN] for line in list(self._lines))

    def _read_pipe(self) -> None:
        partial = b""
        with open(self._read, "rb", buffering=0) as pipe:
            while chunk := pipe.read(1 << 16):
                whole, mark, partial = (partial + chunk).rpartition(b"\n")
                if len(partial) > 1 << 16:  # an endless line; log it in pieces
                    whole, mark, partial = whole + mark + partial, b"\n", b""
                if mark:
                    self._record(whole + mark)
        if partial:
            self._record(partial + b"\n")

    def _record(self, lines: bytes) -> None:
        self._lines.extend(line for line in lines.splitlines()[-LAST_LINES:] if line.strip())
        self._log.add(lines)
