"""Ctrl-C, SIGTERM, a scheduler's SIGUSR1 and a terminal that closes leave a run which can be resumed."""

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

ECHO_S = 2.0  # signals within so long are one: schedulers send them to each process, and those pass them on
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class GracefulStop:
    """While entered, the first signal of `STOPPING` only sets `requested`; the loop finishes its step, saves and raises
    `Interrupted`. A second one raises KeyboardInterrupt at once, with its number: the last checkpoint is what remains.
    SIGHUP stays ignored under `nohup`.

    A request that comes when nothing is left to stop (in the last step, or while the final model is saved) lets the
    stage end as it would have; `take_ignored_signal` tells whoever would begin the next one.

    number: of the signal that has asked.

    Signals belong to the main thread: entered from another one, this does nothing.
    """

    _unheeded: ClassVar[int] = 0  # of the process, since it was asked last: the signal's number

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
            GracefulStop._unheeded = self.number

    @property
    def asked(self) -> int:
        """The number of the signal that has asked to stop, 0 if none has."""
        return self.number if self.requested else 0

    @classmethod
    def take_ignored_signal(cls) -> int:
        """The number of the signal that asked a stage to stop which ended as if nobody had; once, else 0."""
        found, GracefulStop._unheeded = cls._unheeded, 0
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
        _tell_from_handler(f"{name}: finishing the step and saving; once more stops at once")


def _tell_from_handler(line: str) -> None:
    """A line on stderr from a signal handler, which may run in the middle of another write to it: Python then refuses
    the second one (RuntimeError, a reentrant call). Whoever read our lines may be gone, which must not end the run."""
    with contextlib.suppress(OSError):
        try:
            terminal.note(line)
        except RuntimeError:
            os.write(2, f"{line}\n".encode())


def redirect_to_null(descriptors: Sequence[int]) -> None:
    """What is written to them goes nowhere: a terminal that has closed answers every write with an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def stop_with_parent() -> None:
    """In a child: SIGTERM ourselves when the parent is gone, so that no run is left behind without anyone watching."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter shuts down
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
