"""Ctrl-C that leaves a run which can be resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, ClassVar

ECHO_S = 2.0  # SIGTERMs within so long are one: schedulers send it to each process, and those pass it on


class GracefulStop:
    """While entered, the first Ctrl-C or SIGTERM only sets `requested`; the loop finishes its step, saves and raises
    `Interrupted`. A second one raises KeyboardInterrupt at once: the last checkpoint is what remains.

    A request that comes when nothing is left to stop (in the last step, or while the final model is saved) lets the
    stage end as it would have; `unheeded` tells whoever would begin the next one.

    Signals belong to the main thread: entered from another one, this does nothing.
    """

    _unheeded: ClassVar[bool] = False  # of the process, since it was asked last

    def __init__(self) -> None:
        self.requested = False
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self.requested and kind is None:
            GracefulStop._unheeded = True

    @classmethod
    def unheeded(cls) -> bool:
        """Whether a stage ended as if nobody had asked it to stop, although somebody had; True once."""
        found, GracefulStop._unheeded = cls._unheeded, False
        return found

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and number == signal.SIGTERM and time.monotonic() - self._asked_at < ECHO_S:
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self._asked_at = True, time.monotonic()
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        with contextlib.suppress(OSError):  # whoever read our lines may be gone, and that must not end the run here
            print(f"{name}: finishing the step and saving; once more stops at once", file=sys.stderr, flush=True)


def stop_with_parent() -> None:
    """In a child: SIGTERM ourselves when the parent is gone, so that no run is left behind without anyone watching."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter shuts down
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
