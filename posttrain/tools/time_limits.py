"""Blocking user code on threads with a time limit. Python cannot stop a thread, so a late one keeps running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run(call: Callable[[], T], seconds: float | None = None) -> T:
    """Run a call on its own thread and return its result. Raises TimeoutError if it takes longer than `seconds`.

    The thread of a late call, or of a cancelled coroutine, keeps running.
    """
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(in_thread(call, "environment"))


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run a blocking call on a daemon thread of this name, which does not keep the process alive. Returns a future that
    cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
