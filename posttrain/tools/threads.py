"""Calls on threads, some at a time, each with a limit of time. Python cannot stop a thread: a late one is left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as Late
from typing import Any


def run(calls: Mapping[int, Callable[[], Any]], seconds: float, count: int) -> dict[int, Future[Any]]:
    """The finished future of each call, in order, `count` at a time; of one that takes longer than `seconds`, with Late
    in it.

    A late call keeps its thread and gives up its place, so that calls which never end do not hold up the others. The
    threads are daemons: they do not keep the process either.
    """
    waiting = deque(calls.items())
    running: dict[Future[Any], tuple[int, float]] = {}  # -> number of the call, when it is late
    found: dict[int, Future[Any]] = {}
    while waiting or running:
        while waiting and len(running) < count:
            number, call = waiting.popleft()
            running[_started(call)] = (number, time.monotonic() + seconds)
        first = min(late for _, late in running.values())
        wait(running, timeout=max(0.0, first - time.monotonic()), return_when=FIRST_COMPLETED)
        for future, (number, late) in list(running.items()):
            if future.done() or time.monotonic() >= late:
                del running[future]
                found[number] = future if future.done() else _late()
    return {number: found[number] for number in calls}


def _started(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return future


def _late() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(Late())
    return future
