"""A run that hangs ends: with the name of the phase, the stacks of all threads on disk, and exit code 1.

A loop enters a phase with `with watchdog.phase("sync"):`. The same clock gives the phase's seconds for the metrics.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType

FACTOR = 10  # times the median of a phase
FIRST = 6  # times the floor, while a phase has no median yet: compilation and cold caches come first
REMEMBERED = 50  # durations of a phase that its median is taken of
POLL_S = 1.0


class Watchdog:
    """While entered, a thread compares the phase that is running with what it took before.

    A phase is taken to hang once it lasts longer than the floor and than 10 times its own median; the first time,
    longer than 6 times the floor. Then stacks go to `folder/hang-rankN.txt`, and the process ends at once, since a
    thread that waits inside a library cannot be woken. Its checkpoints are whole: they only count when sealed.

    Time is counted in the thread's own ticks, so that a process that was stopped (Ctrl-Z, a sleeping laptop) does not
    count as hung. What holds Python's global lock for ever also stops this thread and is not seen.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float | None,
        *,
        poll_s: float = POLL_S,
        stop: Callable[[], None] | None = None,
    ) -> None:
        """minutes: the floor; None: phases are timed, and nothing is watched. stop: default `end_process`."""
        self.folder, self.poll_s, self.stop = folder, poll_s, stop or end_process
        self.floor_s = None if minutes is None else 60 * minutes
        self.rank = int(os.environ.get("RANK", "0"))  # torchrun's name for it
        self.step = 0  # the loop's, for the message
        self.seconds: dict[str, float] = {}
        self._past: dict[str, deque[float]] = {}
        self._phase: str | None = None
        self._entered: AbstractContextManager[None] | None = None
        self._ticks = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.floor_s is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def begin_step(self, step: int) -> None:
        """Step 0, 1, ... begins; seconds of earlier phases are forgotten."""
        self.step, self.seconds = step, {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is called `name`. Phases do not nest. One that fails leaves no duration behind."""
        started, self._ticks, self._phase = perf_counter(), 0, name
        try:
            yield
        finally:
            self._phase = None
        took = perf_counter() - started
        self._past.setdefault(name, deque(maxlen=REMEMBERED)).append(took)
        self.seconds[name] = self.seconds.get(name, 0.0) + took

    def enter(self, name: str) -> None:
        """`phase` for loops that are made of hooks: `leave` ends it."""
        self._entered = self.phase(name)
        self._entered.__enter__()

    def leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def times(self) -> dict[str, float]:
        """Seconds of this step by phase, as `time/NAME`."""
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}

    def limit(self, name: str) -> float:
        """Seconds after which this phase counts as hung."""
        assert self.floor_s is not None
        past = self._past.get(name)
        return max(self.floor_s, FACTOR * statistics.median(past)) if past else FIRST * self.floor_s

    def _watch(self) -> None:
        while not self._closed.wait(self.poll_s):
            self._ticks += 1
            name = self._phase
            if name is not None and self._ticks * self.poll_s > self.limit(name):
                self._end(name)
                return

    def _end(self, name: str) -> None:
        """Tell and stop. A full disk must not keep the process alive."""
        text = f"rank {self.rank}, step {self.step + 1}: the phase `{name}` takes longer than {self.limit(name):.0f} s"
        path = self.folder / f"hang-rank{self.rank}.txt"
        try:
            with path.open("w", encoding="utf-8") as file:
                print(text, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
            told = f"stacks of all threads: {path}"
        except OSError as error:
            told = f"stacks could not be written: {error}"
        with suppress(OSError):  # nobody may read stderr any more
            print(
                f"{text} and seems to hang; stopping\n  {told}\n"
                "  hint: go on with the same command and --resume; run.hang_minutes sets how long is too long",
                file=sys.stderr,
                flush=True,
            )
        self.stop()


def end_process() -> None:
    """End this process with code 1, and the processes that it has started by multiprocessing, such as vLLM's.

    They end by themselves when their parent is gone, but not one that hangs: it would keep its memory on the GPU.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
