"""An engine beside the trainer that starts in a thread while the trainer loads its model."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from posttrain.errors import EngineError
from posttrain.rollout import engine_process, warm_process
from posttrain.rollout.engine_client import EngineClient, close_all
from posttrain.tools.time_limits import in_thread

POLL_S = 0.05
Clients = Sequence[EngineClient]


class StartingEngine:
    """Placeholder of an engine that is starting: its first use waits for the engine, or raises the error of
    the start."""

    def __init__(
        self,
        start: Callable[[], Clients],
        finish: Callable[[Clients], Any],
        *,
        beside: bool = False,
        key: object = None,
        folder: Path | None = None,
    ) -> None:
        """start: runs in the thread; must end soon after its processes are killed. finish: makes the engine from the
        clients that `start` returned, in the thread of its first user.

        beside: `start` runs while the trainer uses the same GPU; if it fails, the first user calls it once more. key:
        what the engine is started for, to compare. folder: the engine's model folder, which `close` removes.
        """
        self.finish, self.beside, self.key, self.folder = finish, beside, key, folder
        self._start = start
        self._warm = warm_process.count_waiting()
        self._others = set(multiprocessing.active_children())
        self._clients = in_thread(start, "engine-start")
        self._engine = Future[Any]()

    def wait_for_processes(self) -> None:
        """Block until a warm process has become the first engine core, or the start has failed.

        Until then the start imports vLLM in this process, and every other thread slows it down; the engine, which is
        usually ready last, then starts on other CPU cores. A second engine may start only after the first, which waits
        for the trainer's model.
        """
        while 0 < self._warm <= warm_process.count_waiting() and futures.wait([self._clients], POLL_S).not_done:
            pass

    def wait(self, enough: Callable[[], bool] = lambda: False) -> bool:
        """Block until the engine has started and return True, or until `enough()` is true and return False. Raises the
        error of the start."""
        while futures.wait([self._clients], POLL_S).not_done:
            if enough():
                return False
        self.engine()
        return True

    def engine(self) -> Any:
        """Wait for the engine and return it. Raises the error of the start.

        Ctrl-C ends the wait and leaves the start to `close`: in the main thread, vLLM would treat a KeyboardInterrupt
        as a reason to keep waiting for the process that it has ended.
        """
        futures.wait([self._clients])
        if not self._engine.done():
            try:
                again = self.beside and isinstance(self._clients.exception(), Exception)
                self._engine.set_result(self.finish(self._start() if again else self._clients.result()))
            except BaseException as error:
                self._engine.set_exception(error)
        return self._engine.result()

    def engine_or_close(self) -> Any:
        """Wait for the engine and return it (`engine`), or end everything that was started and raise."""
        try:
            return self.engine()
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.engine(), name)

    def close(self) -> None:
        """Close the engine, or end its start. May be called twice."""
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
    """Block until an engine that may be starting is ready, or until `enough()` is true."""
    if isinstance(engine, StartingEngine):
        engine.wait(enough)
