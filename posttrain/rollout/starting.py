"""An engine that starts in a thread of its own, while the trainer gets ready."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from posttrain.errors import EngineError
from posttrain.rollout import engine_process

T = TypeVar("T")
POLL_S = 0.05


class StartingEngine(Generic[T]):
    """Takes an engine's place until someone uses it, who then waits for it, or gets the error that it failed with.

    `start` runs in the thread and returns what `finish` makes the engine of, in the thread of whoever uses it first.
    The start must end soon after its processes were killed.
    """

    def __init__(
        self,
        start: Callable[[], T],
        finish: Callable[[T], Any],
        give_up: Callable[[T], None],
        again: Callable[[], T] | None = None,
    ) -> None:
        """give_up: ends what `start` returned where nobody wants it any more. again: called in place of a start that
        failed, when whoever uses the engine waits for it; None: its error is raised."""
        self.finish, self.again = finish, again
        self._start, self._give_up = start, give_up
        self._started: list[T] = []
        self._error: BaseException | None = None
        self._engine: Any = None
        self._closed = False
        self._others = set(multiprocessing.active_children())
        self._over = (
            threading.Event()
        )  # after a Ctrl-C in `Thread.join` Python 3.11 says that a running thread has ended
        threading.Thread(target=self._run, name="engine-start", daemon=True).start()

    def _run(self) -> None:
        try:
            self._started.append(self._start())
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def wait(self, enough: Callable[[], bool] = lambda: False) -> bool:
        """Block until the engine is there, or something is `enough`; returns which it was. Raises what the start
        raised."""
        while not self._over.wait(POLL_S):
            if enough():
                return False
        self.engine()
        return True

    def engine(self) -> Any:
        """The engine itself, once it is there. Raises what the start raised.

        Ctrl-C ends the wait and leaves the start to `close`: vLLM, called in the main thread, takes one for a reason to
        go on waiting for the process that it has ended.
        """
        while not self._over.wait(POLL_S):
            pass
        if self._closed:
            raise EngineError("the engine is closed")
        if self._engine is None:
            try:
                if isinstance(self._error, Exception) and self.again is not None:
                    again, self.again, self._error = self.again, None, None
                    self._started.append(again())
                if self._error is None:
                    self._engine = self.finish(self._started.pop())
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._engine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.engine(), name)

    def close(self) -> None:
        """Close the engine, or end its start. Calling it twice is fine."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()
            return
        while not self._over.wait(POLL_S):
            for process in set(multiprocessing.active_children()) - self._others:
                if process.name.startswith(engine_process.CORE):
                    process.kill()
                    process.join()
        while self._started:
            self._give_up(self._started.pop())


def wait_for(engine: Any, enough: Callable[[], bool]) -> None:
    """Block until an engine that may be starting is there, or something is `enough`."""
    if isinstance(engine, StartingEngine):
        engine.wait(enough)
