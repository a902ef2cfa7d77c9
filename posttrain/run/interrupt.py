"""Graceful stop: Ctrl-C, SIGTERM, a scheduler's SIGUSR1 and a closed terminal leave a run that can be resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, ClassVar

from posttrain import terminal

ECHO_S = 2.0  # signals within this time count as one: schedulers send them to each process, which forwards them
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class GracefulStop:
    """While entered, the first signal of `STOPPING` only sets `requested`; the loop finishes its step, saves and raises
    `Interrupted`. A second signal raises KeyboardInterrupt immediately, with its number; the last checkpoint remains.
    SIGHUP stays ignored under `nohup`.

    If a request comes when nothing is left to stop (in the last step, or while the final model is saved), the stage
    ends normally; `take_ignored_signal` reports the signal to whoever would start the next stage.

    number: of the signal that requested the stop. Signals belong to the main thread: entered in another thread, this
    does nothing.
    """

    _ignored_signal: ClassVar[int] = 0  # number of a signal that has stopped nothing, per process

    def __init__(self) -> None:
        self.requested = False
        self.number: int = signal.SIGINT
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self.requested and kind is None:
            GracefulStop._ignored_signal = self.number

    @property
    def requested_signal(self) -> int:
        """Number of the signal that requested the stop; 0 if none did."""
        return self.number if self.requested else 0

    @classmethod
    def take_ignored_signal(cls) -> int:
        """Return, once, the number of a signal that came during a stage which ended normally; otherwise 0."""
        found, GracefulStop._ignored_signal = cls._ignored_signal, 0
        return found

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and number != signal.SIGINT and time.monotonic() - self._asked_at < ECHO_S:
            return
        if self.requested:
            raise KeyboardInterrupt(number)
        self.requested, self.number, self._asked_at = True, int(number), time.monotonic()
        if number == signal.SIGHUP:
            redirect_to_null(self._terminals)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        _note_from_handler(f"{name}: finishing the step and saving; once more stops immediately")


def _note_from_handler(line: str) -> None:
    """Print a note from a signal handler, which may interrupt another write to stderr: Python then raises RuntimeError
    (a reentrant call). A closed stderr must not end the run."""
    with contextlib.suppress(OSError):
        try:
            terminal.note(line)
        except RuntimeError:
            os.write(2, f"{line}\n".encode())


def redirect_to_null(descriptors: Sequence[int]) -> None:
    """Discard everything written to these descriptors: every write to a closed terminal fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def stop_with_parent() -> None:
    """In a child: send SIGTERM to this process when the parent has ended, so that no run continues unattended."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter shuts down
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
