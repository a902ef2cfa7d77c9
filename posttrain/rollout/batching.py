"""Work for the thread that waits for coroutines, done for many of them in one call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Batch(Generic[A, B]):
    """Members ask, each by its number; one call of `answer` serves all that wait. It runs in the thread of
    `loop.run_all`, which is given `calls`, so an error there ends them all.

    live: the numbers of all members to be. A call waits until each that has not left has asked, so that what it gives
    does not depend on timing. None: nobody waits for others, and each call serves one.
    """

    def __init__(
        self,
        answer: Callable[[Mapping[int, A]], Mapping[int, B]],
        calls: queue.SimpleQueue[Callable[[], object]],
        live: Iterable[int] | None,
    ) -> None:
        self.answer, self.calls = answer, calls
        self.live = None if live is None else set(live)
        self.waiting: dict[int, tuple[A, asyncio.Future[B]]] = {}

    @contextlib.contextmanager
    def member(self, number: int) -> Iterator[Callable[[A], Awaitable[B]]]:
        """The function by which this number asks; after the block it has left. Each number is a member once."""
        try:
            yield functools.partial(self._ask, number)
        finally:
            if self.live is not None:
                self.live.discard(number)
                self._call_if_complete()

    async def _ask(self, number: int, what: A) -> B:
        if number in self.waiting:
            raise ValueError("a rollout asks again before it was answered: give several prompts to one call")
        future: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self.waiting[number] = (what, future)
        self._call_if_complete()
        return await future

    def _call_if_complete(self) -> None:
        if self.waiting and (self.live is None or self.waiting.keys() >= self.live):
            waiting, self.waiting = self.waiting, {}
            self.calls.put(functools.partial(self._call, waiting, asyncio.get_running_loop()))

    def _call(self, waiting: Mapping[int, tuple[A, asyncio.Future[B]]], loop: asyncio.AbstractEventLoop) -> None:
        answers = self.answer({number: waiting[number][0] for number in sorted(waiting)})
        loop.call_soon_threadsafe(_set_results, [(waiting[number][1], answers[number]) for number in sorted(waiting)])


def _set_results(pairs: list[tuple[asyncio.Future[B], B]]) -> None:
    for future, answer in pairs:
        if not future.cancelled():
            future.set_result(answer)
