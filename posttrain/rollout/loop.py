"""The asyncio loop, in a background thread, in which this process talks to its engines and runs rollouts of several
turns.

The loop starts with its first use. Blocking code, such as the training loop, calls `run` or `run_all` from any other
thread; both leave no coroutine running, however they end.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
_FIRST_USE = threading.Lock()


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the loop, from any thread. Cancelling the future cancels the coroutine."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()[0])


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop and return its result or raise its exception (`run_all`)."""
    return run_all([coroutine])[0]


def call(function: Callable[..., T], *args: Any) -> T:
    """Call `function` in the loop's thread and return its result: for asyncio objects that are not thread-safe."""

    async def call_in_loop() -> T:
        return function(*args)

    return run(call_in_loop())


async def catch(work: Awaitable[T], *kinds: type[E]) -> T | E:
    """Await `work` and return its result, or its exception if that is of one of these kinds."""
    try:
        return await work
    except kinds as error:
        return error


def run_all(
    coroutines: Sequence[Coroutine[Any, Any, T]],
    finished: Callable[[int, T], None] | None = None,
    calls: queue.SimpleQueue[Callable[[], object]] | None = None,
) -> list[T]:
    """Run coroutines concurrently in the loop and return their results in order. Blocks; not for the loop's own thread.

    finished: called in this thread with (index, result) of each coroutine as soon as it ends, in order of completion.
    calls: queue of functions to call in this thread meanwhile: work that would block the loop. The first coroutine or
    function that raises, and a signal that raises here (Ctrl-C), cancel the others. The exception is raised once all of
    them have ended, so their `finally` blocks have run.
    """
    loop, thread = _loop()
    if threading.current_thread() is thread:
        raise RuntimeError("called in the loop's own thread, which it would block: await the coroutines there")
    calls = queue.SimpleQueue() if calls is None else calls
    tasks: list[asyncio.Task[T]] = []
    results: dict[int, T] = {}

    def start() -> None:
        for place, coroutine in enumerate(coroutines):
            tasks.append(loop.create_task(coroutine))
            tasks[-1].add_done_callback(functools.partial(end, place))

    def end(place: int, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: of several, one is raised
        calls.put(functools.partial(take, place, task))

    def take(place: int, task: asyncio.Task[T]) -> None:
        results[place] = task.result()
        if finished is not None:
            finished(place, results[place])

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for coroutine in coroutines:
            coroutine.close()  # one that never started

    try:
        loop.call_soon_threadsafe(start)
        while len(results) < len(coroutines):
            calls.get()()
    except BaseException:
        submit(stop()).result()
        raise
    return [results[place] for place in range(len(coroutines))]


def _loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    with _FIRST_USE:  # two threads could start a loop each
        return _start()


@functools.cache
def _start() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run_forever, args=(loop,), name="rollouts", daemon=True)
    thread.start()
    return loop, thread


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop again when a coroutine's KeyboardInterrupt or SystemExit has stopped it. Whoever waits for that
    coroutine gets the exception; the others go on."""
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            continue
