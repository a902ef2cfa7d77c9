"""Collective calls: several processes make the same call, and it is executed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from posttrain.errors import EngineError, PosttrainError

A = TypeVar("A")


class Meeting(Generic[A]):
    """Executes a call once all `size` members have made it, and gives each member its result or its error.

    When a member leaves, the meeting is over: members that wait, and later calls, get the reason.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.over: PosttrainError | None = None  # why the meeting is over
        self._call = ""
        self._asked: dict[int, A] = {}  # arguments by member
        self._answer: asyncio.Future[Any] | None = None
        self._work: asyncio.Task[None] | None = None  # keeps the task from being collected

    async def join(
        self, member: int, call: str, argument: A, do: Callable[[Sequence[A]], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Wait for all members to make this call, and return the result of `do` on their arguments, in order of member.

        do: called once, by the last member to arrive. Raises EngineError if members make different calls.
        """
        if self.over is not None:
            raise self.over.copy()
        if self._answer is None:
            self._call, self._answer = call, asyncio.get_running_loop().create_future()
            self._answer.add_done_callback(_mark_as_read)
        answer = self._answer
        if call != self._call or member in self._asked:
            self.end(EngineError(f"ranks that share an engine call `{self._call}` and `{call}` at the same time"))
        self._asked[member] = argument
        if len(self._asked) == self.size and not answer.done():
            arguments = [self._asked[place] for place in range(self.size)]
            self._asked, self._answer = {}, None
            self._work = asyncio.create_task(_settle(answer, do(arguments)))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.end(EngineError(f"a rank has cancelled `{call}`, which all ranks of an engine call together"))
            raise

    def end(self, error: PosttrainError) -> None:
        """End the meeting because a member leaves; the first reason is kept."""
        self.over = self.over or error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


async def _settle(answer: asyncio.Future[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Await `work` and set its result or exception on the future `answer`."""
    try:
        result = await work
    except Exception as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(result)


def _mark_as_read(answer: asyncio.Future[Any]) -> None:
    """Retrieve the exception of `answer`, so that asyncio does not warn that nobody did."""
    if not answer.cancelled():
        answer.exception()
