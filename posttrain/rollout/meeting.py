"""Calls that several processes make together, and that are obeyed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from posttrain.errors import EngineError, PosttrainError

A = TypeVar("A")


class Meeting(Generic[A]):
    """Has a call done when each of `size` members has asked for it, and gives all of them its result or its error.

    A member that leaves ends it: whoever waits, or asks later, gets the reason.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.over: PosttrainError | None = None  # why it has ended
        self._call = ""
        self._asked: dict[int, A] = {}  # by member
        self._answer: asyncio.Future[Any] | None = None
        self._work: asyncio.Task[None] | None = None  # the loop alone would let it be collected

    async def join(
        self, member: int, call: str, argument: A, do: Callable[[Sequence[A]], Coroutine[Any, Any, Any]]
    ) -> Any:
        """What `do` returns for the arguments of all members, in their order.

        do: called once, for the member that comes last. Raises EngineError where the others ask for something else.
        """
        if self.over is not None:
            raise self.over.copy()
        if self._answer is None:
            self._call, self._answer = call, asyncio.get_running_loop().create_future()
            self._answer.add_done_callback(_mark_as_read)
        answer = self._answer
        if call != self._call or member in self._asked:
            self.end(EngineError(f"the ranks of one engine ask for `{self._call}` and `{call}` at the same time"))
        self._asked[member] = argument
        if len(self._asked) == self.size and not answer.done():
            arguments = [self._asked[place] for place in range(self.size)]
            self._asked, self._answer = {}, None
            self._work = asyncio.create_task(_settle(answer, do(arguments)))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.end(EngineError(f"a rank has given up `{call}`, which all ranks of one engine do together"))
            raise

    def end(self, error: PosttrainError) -> None:
        """A member leaves; the first reason stays."""
        self.over = self.over or error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


async def _settle(answer: asyncio.Future[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Give a future what `work` returns or raises."""
    try:
        result = await work
    except Exception as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(result)


def _mark_as_read(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()
