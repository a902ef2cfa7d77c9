"""Environment steps that never end affect only themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

from posttrain.errors import ToolError
from posttrain.tools.environments import Environments
from posttrain.tools.time_limits import run


class Game:
    """Hangs on `hang` until the test is over, raises on `raise`, ends on anything else."""

    over = threading.Event()

    def reset(self, row: Any) -> None:
        self.points = row["points"]

    def step(self, text: str) -> tuple[Any, ...]:
        if text == "infinite":
            return "", True, float("inf")
        if text == "hang":
            self.over.wait(30)
        if text == "raise":
            raise RuntimeError(text)
        return "", True

    def score(self) -> Any:
        return self.points

    def close(self) -> None:
        pass


@pytest.fixture
def game() -> Any:
    Game.over.clear()
    yield Game
    Game.over.set()


def test_call_time_out_is_reported() -> None:
    assert asyncio.run(run(lambda: 5, 10)) == 5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run(lambda: 1 // 0, 10))
    with pytest.raises(TimeoutError):
        asyncio.run(run(partial(time.sleep, 1), 0.1))


def test_concurrency_is_limited(game: Any) -> None:
    live, most = [0], [0]
    lock = threading.Lock()

    def call() -> None:
        with lock:
            live[0] += 1
            most[0] = max(most[0], live[0])
        time.sleep(0.01)
        with lock:
            live[0] -= 1

    async def every() -> None:
        world = Environments(game, workers=3, timeout_s=5)
        await asyncio.gather(*(world.run(call, 5) for _ in range(12)))

    asyncio.run(every())
    assert most == [3]


def test_more_hanging_steps_than_threads(game: Any) -> None:
    """Six of eight steps hang, two at a time: the others are answered, and the next turn begins."""
    turns = ["hang"] * 6 + ["go", "raise"]

    async def played(world: Environments, number: int) -> tuple[str, float | None]:
        episode = world.episode(number)
        await episode.begin({"points": number})
        ended = (await episode.reply(turns[number])).ended
        score = await episode.score()
        await episode.close()
        return ended, score

    async def every() -> list[tuple[str, float | None]]:
        world = Environments(game, workers=2, timeout_s=0.5)
        return await asyncio.gather(*(played(world, n) for n in range(8)))

    started = time.monotonic()
    found = asyncio.run(every())
    assert found == [("time", None)] * 6 + [("done", 6.0), ("error", None)]
    assert time.monotonic() - started < 20
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "environment")


def test_first_failure_of_each_method_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of three steps raise: one note names row, error and line; `score` and `close` get their own."""

    class Faulty(Game):
        def score(self) -> Any:
            raise KeyError("points")

        def close(self) -> None:
            raise OSError("still in use")

    async def play() -> None:
        world = Environments(Faulty, workers=1, timeout_s=5)
        for turn in ("raise", "raise", "go"):
            episode = world.episode(0)
            await episode.begin({"points": 1, "uid": "r7"})
            await episode.reply(turn)
            assert await episode.score() is None
            await episode.close()

    asyncio.run(play())
    said = capsys.readouterr().err
    assert said.count("`step` raised RuntimeError: raise (") == said.count("\n") - 2 == 1
    assert f"{__file__}:{Game.step.__code__.co_firstlineno + 6})" in said and "r7" in said
    assert "`score` raised KeyError: 'points' (" in said and "`close` raised OSError: still in use (" in said


async def episode_of(game: Any, points: Any) -> Any:
    episode = Environments(game, workers=1, timeout_s=5).episode(0)
    await episode.begin({"points": points})
    return episode


@pytest.mark.parametrize("points", ["many", float("nan"), float("inf")])
def test_non_numeric_score_is_reported(points: Any, game: Any) -> None:
    async def score() -> None:
        await (await episode_of(game, points)).score()

    with pytest.raises(ToolError, match="score returned"):
        asyncio.run(score())


def test_non_numeric_step_reward_is_reported(game: Any) -> None:
    async def step() -> None:
        await (await episode_of(game, 1)).reply("infinite")

    with pytest.raises(ToolError, match="step returned inf"):
        asyncio.run(step())


def test_environment_closed_during_construction_is_closed_once() -> None:
    making, go_on, closed = threading.Event(), threading.Event(), []

    class Slow(Game):
        def __init__(self) -> None:
            making.set()
            go_on.wait(10)

        def close(self) -> None:
            closed.append(self)

    async def cancelled() -> None:
        episode = Environments(Slow, workers=1, timeout_s=5).episode(0)
        begun = asyncio.ensure_future(episode.begin({"points": 1}))
        await asyncio.to_thread(making.wait, 10)
        begun.cancel()
        await episode.close()
        await asyncio.wait([begun])
        go_on.set()
        while not closed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await episode.close()

    asyncio.run(asyncio.wait_for(cancelled(), 20))
    assert len(closed) == 1
