"""Calls that several processes make together: executed once for all, and no member waits for one that has left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from posttrain.errors import EngineError, PeerLost
from posttrain.rollout.shared_client import CollectiveCalls


def run_threads(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return what each function returns or raises, each run in its own thread."""

    async def run() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)

    return asyncio.run(run())


def test_call_is_executed_once_with_all_arguments_in_order() -> None:
    done: list[Sequence[str]] = []

    async def do(arguments: Sequence[str]) -> int:
        done.append(arguments)
        return len(done)

    async def twice(calls: CollectiveCalls[str], member: int) -> list[int]:
        return [await calls.join(member, call, f"{call} {member}", do) for call in ("pause", "resume")]

    calls = CollectiveCalls[str](3)
    assert run_threads(*(twice(calls, member) for member in (2, 0, 1))) == [[1, 2]] * 3
    assert done == [[f"{call} {member}" for member in range(3)] for call in ("pause", "resume")]


def test_an_error_is_raised_in_all_members() -> None:
    async def fail(_: Sequence[None]) -> None:
        raise EngineError("no memory")

    calls = CollectiveCalls[None](2)
    found = run_threads(*(calls.join(member, "wake", None, fail) for member in range(2)))
    assert [(type(error), str(error)) for error in found] == [(EngineError, "no memory")] * 2


def test_members_do_not_wait_for_a_member_that_has_left() -> None:
    """Both members that already wait and members that call later get the error; the first reason is kept."""

    async def never(_: Sequence[None]) -> None:
        raise AssertionError("one is missing")

    calls = CollectiveCalls[None](2)

    async def leave() -> None:
        calls.end(EngineError("rank 1 failed: no room"))
        calls.end(PeerLost("rank 1 has left the engine"))
        with pytest.raises(EngineError, match="rank 1 failed: no room"):
            await calls.join(1, "sleep", None, never)

    first, second = run_threads(calls.join(0, "pause", None, never), leave())
    assert str(first) == "rank 1 failed: no room" and second is None


def test_an_interrupted_member_ends_the_call_for_all() -> None:
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


def test_no_warning_of_an_unread_error_when_the_only_member_is_cancelled() -> None:
    reports: list[dict[str, Any]] = []

    async def never(_: Sequence[None]) -> None:
        raise AssertionError("one is missing")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        calls = CollectiveCalls[None](2)
        alone = asyncio.create_task(calls.join(0, "pause", None, never))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        del calls, alone
        gc.collect()

    asyncio.run(run())
    assert not reports


def test_different_calls_at_the_same_time_raise() -> None:
    async def never(_: Sequence[None]) -> None:
        raise AssertionError("they differ")

    calls = CollectiveCalls[None](2)
    found = run_threads(calls.join(0, "pause", None, never), calls.join(1, "sleep", None, never))
    told = "ranks that share an engine call `pause` and `sleep` at the same time"
    assert [str(error) for error in found] == [told] * 2
