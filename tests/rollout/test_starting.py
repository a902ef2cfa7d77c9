"""An engine that starts beside other work: its first use waits for the start, and no start outlives the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.errors import EngineError
from posttrain.rollout import warm_process
from posttrain.rollout.starting import StartingEngine, wait_for


class Client:
    """Stand-in for the client of an engine's process."""

    def __init__(self, name: str = "client") -> None:
        self.name, self.closed = name, 0

    def close(self) -> None:
        self.closed += 1


class Engine:
    """Stand-in for an engine, made from its client; records its thread."""

    def __init__(self, clients: Any) -> None:
        (client,) = clients
        self.client, self.thread, self.closed = client.name, threading.current_thread(), 0
        self.version = 0

    def sync(self, model: str, version: int) -> str:
        self.version = version
        return f"{self.client} {model}"

    def close(self) -> None:
        self.closed += 1


def never() -> bool:
    raise AssertionError("nobody waits for it")


def test_first_use_waits_and_finishes_the_start_in_its_thread() -> None:
    go, made = threading.Event(), list[Engine]()

    def start() -> Any:
        assert threading.current_thread() is not threading.main_thread()
        go.wait()
        return [Client()]

    def finish(clients: Any) -> Engine:
        made.append(Engine(clients))
        return made[0]

    engine: Any = StartingEngine(start, finish)
    assert not engine.wait(lambda: True) and not made
    threading.Timer(0.2, go.set).start()
    assert engine.sync("model", 3) == "client model"
    assert engine.version == 3 and made[0].thread is threading.current_thread() and len(made) == 1
    wait_for(engine, lambda: False)
    wait_for(made[0], never)  # a started engine
    engine.close()
    assert made[0].closed == 1


@pytest.mark.parametrize("use", [lambda engine: engine.version, lambda engine: engine.wait()])
def test_failed_start_raises_at_first_use(use: Callable[[Any], Any]) -> None:
    def start() -> Any:
        raise EngineError("vLLM did not start: no memory")

    engine = StartingEngine(start, Engine)
    for _ in range(2):
        with pytest.raises(EngineError, match="did not start: no memory"):
            use(engine)
    engine.close()


def test_failed_start_is_retried_once_at_first_use() -> None:
    """The retry's own error is raised, also at later uses of the engine."""

    def start() -> Any:
        tries.append(threading.current_thread() is threading.main_thread())
        if len(tries) == 1:
            raise EngineError("beside the trainer")
        return [Client("second")]

    tries: list[bool] = []
    engine: Any = StartingEngine(start, Engine, beside=True)
    assert engine.sync("model", 1) == "second model"
    assert tries == [False, True]

    def fails() -> Any:
        tries.append(threading.current_thread() is threading.main_thread())
        raise EngineError("alone as well" if len(tries) > 1 else "beside the trainer")

    tries = []
    engine = StartingEngine(fails, Engine, beside=True)
    for _ in range(2):
        with pytest.raises(EngineError, match="alone as well"):
            engine.wait()
    assert tries == [False, True]


def test_engine_that_cannot_be_finished_raises_at_each_use() -> None:
    def finish(clients: Any) -> Engine:
        raise EngineError(f"{clients[0].name}: stale engine")

    engine = StartingEngine(lambda: [Client()], finish)
    for _ in range(2):
        with pytest.raises(EngineError, match="client: stale engine"):
            engine.wait()
    engine.close()


def test_closing_ends_a_start_by_killing_its_processes() -> None:
    """Only the engine's of the processes started since are killed."""
    before = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
    before.start()

    def start() -> Any:
        context = multiprocessing.get_context("spawn")
        core = context.Process(target=time.sleep, args=(600,), name="EngineCore")
        other = context.Process(target=time.sleep, args=(600,), name="worker")
        for process in (core, other):
            process.start()
            started.append(process)
        core.join()
        raise EngineError("its process was killed")

    started: list[Any] = []
    engine = StartingEngine(start, Engine)
    began = time.monotonic()
    try:
        engine.close()
        engine.close()
        assert time.monotonic() - began < 30
        assert not started[0].is_alive() and started[1].is_alive() and before.is_alive()
        with pytest.raises(EngineError, match="closed"):
            engine.wait()
    finally:
        for process in [before, *started]:
            process.kill()
            process.join()


def test_closing_ends_an_unused_engine() -> None:
    client = Client()
    engine = StartingEngine(lambda: [client], Engine)
    engine.close()
    engine.close()
    assert client.closed == 1


def test_ctrl_c_ends_a_start() -> None:
    """At a KeyboardInterrupt vLLM stops waiting for the process without an error, and then waits for its answer."""

    def start() -> Any:
        core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
        core.start()
        started.append(core)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while core.exitcode is None:
            try:
                core.join()
            except KeyboardInterrupt:
                continue
        raise EngineError("its process was killed")

    started: list[Any] = []
    began = time.monotonic()
    engine = StartingEngine(start, Engine)
    with pytest.raises(KeyboardInterrupt):
        engine.engine()
    engine.close()
    assert time.monotonic() - began < 30 and not started[0].is_alive()


def test_start_can_be_awaited() -> None:
    engine = StartingEngine(lambda: [Client()], Engine).engine()
    assert isinstance(engine, Engine) and engine.thread is threading.current_thread() and not engine.closed
    with pytest.raises(EngineError, match="no memory"):
        StartingEngine(lambda: catch_error(EngineError("no memory")), Engine).engine()


def catch_error(error: Exception) -> Any:
    raise error


def test_setup_goes_on_once_an_engine_core_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While vLLM is imported here, other threads would slow the import down. The second engine starts after the first,
    which waits for the trainer's model; a failed start takes no process."""
    waiting, go = [2], threading.Event()
    monkeypatch.setattr(warm_process, "count_waiting", lambda: waiting[0])

    def start() -> Any:
        time.sleep(0.1)
        waiting[0] = 1
        go.wait()
        waiting[0] = 0
        return [Client()]

    starting = StartingEngine(start, Engine)
    starting.wait_for_processes()
    assert waiting == [1] and not go.is_set()
    go.set()
    starting.close()

    def fail() -> Any:
        raise EngineError("no vLLM here")

    waiting[0] = 1
    failed = StartingEngine(fail, Engine)
    failed.wait_for_processes()
    with pytest.raises(EngineError, match="no vLLM here"):
        failed.engine()
