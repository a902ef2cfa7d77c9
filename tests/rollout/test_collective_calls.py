"""Calls that several processes make together: done once, for all, and nobody waits for one that has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from posttrain.errors import EngineError, PeerLost
from posttrain.rollout.shared_client import CollectiveCalls


def outcomes(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """What each returns or raises."""

    async def run() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)

    return asyncio.run(run())


def test_a_call_is_done_once_with_all_arguments_in_order() -> None:
    done: list[Sequence[str]] = []

    async def do(arguments: Sequence[str]) -> int:
        done.append(arguments)
        return len(done)

    async def twice(calls: CollectiveCalls[str], member: int) -> list[int]:
        return [await calls.join(member, call, f"{call} {member}", do) for call in ("pause", "resume")]

    calls = CollectiveCalls[str](3)
    assert outcomes(*(twice(calls, member) for member in (2, 0, 1))) == [[1, 2]] * 3
    assert done == [[f"{call} {member}" for member in range(3)] for call in ("pause", "resume")]


def test_all_get_the_error() -> None:
    async def fail(_: Sequence[None]) -> None:
        raise EngineError("no memory")

    calls = CollectiveCalls[None](2)
    found = outcomes(*(calls.join(member, "wake", None, fail) for member in range(2)))
    assert [(type(error), str(error)) for error in found] == [(EngineError, "no memory")] * 2


def test_nobody_waits_for_a_member_that_has_left() -> None:
    """Neither who waits already nor who comes later; the first reason stays."""

    async def never(_: Sequence[None]) -> None:
        raise AssertionError("one is missing")

    calls = CollectiveCalls[None](2)

    async def leave() -> None:
        calls.end(EngineError("rank 1 failed: no room"))
        calls.end(PeerLost("rank 1 has left the engine"))
        with pytest.raises(EngineError, match="rank 1 failed: no room"):
            await calls.join(1, "sleep", None, never)

    first, second = outcomes(calls.join(0, "pause", None, never), leave())
    assert str(first) == "rank 1 failed: no room" and second is None


def test_a_member_that_gives_up_ends_the_meeting() -> None:
    async def never(_: Sequence[None]) -> None:
        raise AssertionError("one is missing")

    async def run() -> list[Any]:
        calls = CollectiveCalls[None](3)
        waiting = [asyncio.create_task(calls.join(member, "pause", None, never)) for member in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    given_up, other = asyncio.run(run())
    assert isinstance(given_up, asyncio.CancelledError) and "cancelled `pause`" in str(other)


def test_different_calls_at_the_same_time_are_an_error() -> None:
    async def never(_: Sequence[None]) -> None:
        raise AssertionError("they differ")

    calls = CollectiveCalls[None](2)
    found = outcomes(calls.join(0, "pause", None, never), calls.join(1, "sleep", None, never))
    told = "ranks that share an engine call `pause` and `sleep` at the same time"
    assert [str(error) for error in found] == [told] * 2
