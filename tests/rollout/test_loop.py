"""Coroutines in the background event loop: results in order, and no coroutine keeps running after a call ends."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest

from posttrain.rollout import loop


def test_results_are_in_order_and_reported_as_they_complete() -> None:
    heard: list[tuple[int, str, str]] = []
    places = [asyncio.Event() for _ in range(3)]

    async def one(place: int) -> str:
        if place < 2:
            await places[place + 1].wait()  # the last one ends first
        places[place].set()
        return "abc"[place]

    found = loop.run_all(
        [one(n) for n in range(3)],
        lambda place, value: heard.append((place, value, threading.current_thread().name)),
    )
    assert found == ["a", "b", "c"]
    assert heard == [(n, "abc"[n], threading.current_thread().name) for n in (2, 1, 0)]
    assert loop.run_all([]) == []


def test_all_threads_share_one_loop() -> None:
    async def here() -> tuple[str, Any]:
        return threading.current_thread().name, asyncio.get_running_loop()

    name, first = loop.run(here())
    assert name != threading.current_thread().name
    assert loop.submit(here()).result(10) == (name, first)

    async def blocks_itself() -> None:
        coroutine = here()
        try:
            loop.run(coroutine)
        finally:
            coroutine.close()

    with pytest.raises(RuntimeError, match="await the coroutines"):
        loop.run(blocks_itself())


def test_concurrent_first_calls_start_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks and semaphores of asyncio belong to one loop."""
    make = asyncio.new_event_loop
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: (time.sleep(0.05), make())[1])
    loop._start.cache_clear()
    found: list[Any] = []

    async def here() -> None:
        found.append(asyncio.get_running_loop())

    threads = [threading.Thread(target=lambda: loop.run(here())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(one) for one in found}) == 1


class Waiting:
    """Coroutines that wait until they are cancelled and take a while to end."""

    def __init__(self) -> None:
        self.started, self.ended = 0, 0

    async def wait(self) -> None:
        self.started += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.ended += 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_failing_coroutine_cancels_the_others(error: type[BaseException]) -> None:
    waiting = Waiting()

    async def fail() -> None:
        while waiting.started < 2:
            await asyncio.sleep(0)
        raise error("mine")

    with pytest.raises(error):
        loop.run_all([waiting.wait(), fail(), waiting.wait()])
    assert waiting.ended == 2
    assert loop.run(asyncio.sleep(0, 5)) == 5  # the loop still works


def test_error_in_the_callback_cancels_running_coroutines() -> None:
    waiting = Waiting()

    def refuse(*_: Any) -> None:
        raise ValueError("listener")

    with pytest.raises(ValueError, match="listener"):
        loop.run_all([waiting.wait(), asyncio.sleep(0)], refuse)
    assert waiting.started == waiting.ended == 1


def test_signal_that_raises_cancels_running_coroutines() -> None:
    waiting, main = Waiting(), threading.main_thread()

    async def interrupt() -> None:
        signal.pthread_kill(main.ident or 0, signal.SIGINT)
        await waiting.wait()

    with pytest.raises(KeyboardInterrupt):
        loop.run_all([waiting.wait(), interrupt()])
    assert waiting.started == waiting.ended == 2
