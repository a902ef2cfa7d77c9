"""What rewards and tools print while a run goes on: it goes to a log of the run, not between the lines of its display.

The workers write into pipes that threads of this process empty, so a log has an upper size, and the last words of a
worker that dies are at hand for its error.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from posttrain import terminal

MOST_BYTES = 10 << 20  # of a log; what is printed beyond is read and forgotten
LAST_LINES = 10  # of a worker that dies
SHOWN = 100  # characters of the first line, and of each last one


class Printed:
    """A log for the workers of one pool. tell: says a line to people, once, when something is printed.

    what: who prints, `rewards` or `tools`; the log is `folder/WHAT.log`, of a further rank `folder/WHAT-rankN.log`.
    """

    def __init__(self, folder: Path, what: str, tell: Callable[[str], None], most: int = MOST_BYTES) -> None:
        rank = int(os.environ.get("RANK", "0"))  # torchrun's name for it
        self.path = folder / (f"{what}-rank{rank}.log" if rank else f"{what}.log")
        self._what, self._tell, self._left = what, tell, most
        self._told = False
        self._lock = threading.Lock()

    def add(self, lines: bytes) -> None:
        """Whole lines of one worker. A disk that is full costs the log, not the run."""
        with self._lock:
            told, self._told = self._told, True
            if self._left > 0:
                cut = lines if len(lines) <= self._left else lines[: self._left] + b"\n... the rest is left out\n"
                self._left -= len(lines)
                with contextlib.suppress(OSError):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with self.path.open("ab") as log:
                        log.write(cut)
        if not told:
            first = lines.decode(errors="replace").strip().partition("\n")[0][:SHOWN]
            self._tell(f"{self._what} print ({first}): see {self.path}")


class Shown:
    """In place of a log: what workers print goes to stderr, escaped. It may be a completion."""

    def add(self, lines: bytes) -> None:
        """Whole lines of one worker."""
        terminal.note(lines.decode(errors="replace").removesuffix("\n"))


class Ear:
    """One worker's output. `fd` is for the worker, until `close_write_end`; `last` are its newest lines."""

    def __init__(self, printed: Printed | Shown) -> None:
        self._printed, self._lines = printed, deque[bytes](maxlen=LAST_LINES)
        self._read, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="printed", daemon=True)

    def close_write_end(self) -> None:
        """The worker has its end: it alone keeps the pipe open."""
        os.close(self.fd)
        self._thread.start()

    def last(self, patience: float = 1.0) -> str:
        """Behind the worker's end; what it started may hold the pipe open, so this does not wait for long."""
        self._thread.join(patience)
        return "\n".join(line.decode(errors="replace")[:SHOWN] for line in list(self._lines))

    def _listen(self) -> None:
        begun = b""
        with open(self._read, "rb", buffering=0) as pipe:
            while chunk := pipe.read(1 << 16):
                whole, mark, begun = (begun + chunk).rpartition(b"\n")
                if len(begun) > 1 << 16:  # no line, but something that never ends
                    whole, mark, begun = whole + mark + begun, b"\n", b""
                if mark:
                    self._take(whole + mark)
        if begun:
            self._take(begun + b"\n")

    def _take(self, lines: bytes) -> None:
        self._lines.extend(line for line in lines.splitlines()[-LAST_LINES:] if line.strip())
        self._printed.add(lines)
