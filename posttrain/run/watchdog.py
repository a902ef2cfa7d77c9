"""Watchdog: ends a run that hangs, with the name of the phase, the stacks of all threads on disk, and exit code 1.

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

FACTOR = 10  # time limit as a multiple of the phase's median duration
FIRST = 6  # as a multiple of the floor, while a phase has no median yet: compilation and cold caches
REMEMBERED = 50  # number of a phase's durations for the median
POLL_S = 1.0


class Watchdog:
    """While entered, a thread compares the duration of the current phase with earlier ones.

    A phase counts as hung once it lasts longer than the floor and than 10 times its own median; the first time, longer
    than 6 times the floor. Then stacks are written to `folder/hang-rankN.txt`, and the process ends immediately, since
    a thread that waits inside a library cannot be woken. Its checkpoints are intact: they only count once sealed.

    Time is counted in the thread's own ticks, so that a process that was stopped (Ctrl-Z, a sleeping laptop) does not
    count as hung. A call that holds Python's global lock forever also stops this thread and is not detected.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float | None,
        *,
        poll_s: float = POLL_S,
        stop: Callable[[], None] | None = None,
    ) -> None:
        """minutes: the floor; None: phases are timed but not watched. stop: ends the process; default `end_process`."""
        self.folder, self.poll_s, self.stop = folder, poll_s, stop or end_process
        self.floor_s = None if minutes is None else 60 * minutes
        self.rank = int(os.environ.get("RANK", "0"))  # torchrun's variable
        self.step = 0  # current step, for the message
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
        """Begin step 0, 1, ... and reset the seconds of earlier phases."""
        self.step, self.seconds = step, {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as the phase `name`. Phases do not nest. A phase that raises records no duration."""
        started, self._ticks, self._phase = perf_counter(), 0, name
        try:
            yield
        finally:
            self._phase = None
        took = perf_counter() - started
        self._past.setdefault(name, deque(maxlen=REMEMBERED)).append(took)
        self.seconds[name] = self.seconds.get(name, 0.0) + took

    def enter(self, name: str) -> None:
        """Begin a phase in a loop that is made of hooks; `leave` ends it."""
        self._entered = self.phase(name)
        self._entered.__enter__()

    def leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def times(self) -> dict[str, float]:
        """Return the seconds of this step's phases as `time/NAME`."""
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}

    def limit(self, name: str) -> float:
        """Return the seconds after which this phase counts as hung."""
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
        """Report the hang and stop the process. A full disk must not keep the process alive."""
        text = f"rank {self.rank}, step {self.step + 1}: the phase `{name}` takes longer than {self.limit(name):.0f} s"
        path = self.folder / f"hang-rank{self.rank}.txt"
        try:
            with path.open("w", encoding="utf-8") as file:
                print(text, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
            stacks = f"stacks of all threads: {path}"
        except OSError as error:
            stacks = f"stacks could not be written: {error}"
        with suppress(OSError):  # stderr may be closed
            print(
                f"{text} and seems to hang; stopping\n  {stacks}\n"
                "  hint: go on with the same command and --resume; run.hang_minutes sets how long is too long",
                file=sys.stderr,
                flush=True,
            )
        self.stop()


def end_process() -> None:
    """End this process with code 1, and the processes that it has started by multiprocessing, such as vLLM's.

    They end by themselves when their parent has ended, except a hanging one, which would keep its memory on the GPU.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
