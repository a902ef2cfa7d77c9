"""An engine beside the trainer that starts in a thread of its own, while the trainer gets ready."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from posttrain.errors import EngineError
from posttrain.rollout import engine_process
from posttrain.rollout.engine_client import EngineClient, close_all
from posttrain.tools.time_limits import in_thread

POLL_S = 0.05
Clients = Sequence[EngineClient]


class StartingEngine:
    """Takes an engine's place until someone uses it, who then waits for it, or gets the error that it failed with."""

    def __init__(
        self,
        start: Callable[[], Clients],
        finish: Callable[[Clients], Any],
        *,
        beside: bool = False,
        key: object = None,
        folder: Path | None = None,
    ) -> None:
        """start: runs in the thread; it must end soon after its processes were killed. finish: makes the engine of what
        `start` returned, in the thread of whoever uses it first.

        beside: `start` runs beside other work of its GPU; where it fails, whoever waits for the engine calls it once
        more. key: what the engine is started for, to compare. folder: that of its model, removed by `close`.
        """
        self.finish, self.beside, self.key, self.folder = finish, beside, key, folder
        self._start = start
        self._others = set(multiprocessing.active_children())
        self._clients = in_thread(start, "engine-start")
        self._engine = Future[Any]()

    def wait(self, enough: Callable[[], bool] = lambda: False) -> bool:
        """Block until the engine is there, or something is `enough`; returns which it was. Raises what the start
        raised."""
        while futures.wait([self._clients], POLL_S).not_done:
            if enough():
                return False
        self.engine()
        return True

    def engine(self) -> Any:
        """The engine itself, once it is there. Raises what the start raised.

        Ctrl-C ends the wait and leaves the start to `close`: vLLM, called in the main thread, takes one for a reason to
        go on waiting for the process that it has ended.
        """
        futures.wait([self._clients])
        if not self._engine.done():
            try:
                again = self.beside and isinstance(self._clients.exception(), Exception)
                self._engine.set_result(self.finish(self._start() if again else self._clients.result()))
            except BaseException as error:
                self._engine.set_exception(error)
        return self._engine.result()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.engine(), name)

    def close(self) -> None:
        """Close the engine, or end its start. Calling it twice is fine."""
        engine, self._engine = self._engine, Future[Any]()
        self._engine.set_exception(EngineError("the engine is closed"))
        while futures.wait([self._clients], POLL_S).not_done:
            for process in set(multiprocessing.active_children()) - self._others:
                if process.name.startswith(engine_process.CORE):
                    process.kill()
                    process.join()
        if engine.done():
            if engine.exception() is None:
                engine.result().close()
        elif self._clients.exception() is None:
            close_all(self._clients.result())
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def wait_for(engine: Any, enough: Callable[[], bool]) -> None:
    """Block until an engine that may be starting is there, or something is `enough`."""
    if isinstance(engine, StartingEngine):
        engine.wait(enough)
