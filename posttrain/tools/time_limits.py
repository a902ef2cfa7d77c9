"""Blocking calls of a user's code on threads, each with a limit of time. Python cannot stop a thread: a late one is
left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run(call: Callable[[], T], seconds: float | None = None) -> T:
    """What the call returns or raises, on a thread of its own. Raises TimeoutError if it takes longer than `seconds`.

    The thread of a late call, or of one whose coroutine is cancelled, goes on.
    """
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(in_thread(call, "environment"))


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run a blocking call on a thread of that name, a daemon, which does not keep the process. Returns its result to
    come, which cannot be cancelled."""
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
