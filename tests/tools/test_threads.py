"""Steps that never end cost themselves, and nothing else."""

from __future__ import annotations

import threading
import time
from concurrent.futures import TimeoutError as Late
from functools import partial
from typing import Any

import pytest

from posttrain.errors import ToolError
from posttrain.tools.threads import run
from posttrain.tools.worlds import Environments


class Game:
    """Hangs on `hang` until the test is over, raises on `raise`, is over with anything else."""

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


def test_results_are_in_order_and_late_ones_say_so() -> None:
    calls = {3: partial(time.sleep, 0.1), 1: lambda: 5, 2: partial(time.sleep, 30)}
    found = run(calls, seconds=0.4, count=3)
    assert list(found) == [3, 1, 2]
    assert found[1].result() == 5
    with pytest.raises(Late):
        found[2].result()


def test_at_most_so_many_at_a_time() -> None:
    live, most = [0], [0]
    lock = threading.Lock()

    def call() -> None:
        with lock:
            live[0] += 1
            most[0] = max(most[0], live[0])
        time.sleep(0.01)
        with lock:
            live[0] -= 1

    run(dict.fromkeys(range(12), call), seconds=5, count=3)
    assert most == [3]


def test_more_steps_that_hang_than_there_are_threads(game: Any) -> None:
    """Six of eight steps hang, two at a time: the others are answered, and the next turn begins."""
    world = Environments(game, workers=2, timeout_s=0.1)
    world.begin({n: {"points": n} for n in range(8)})
    started = time.monotonic()
    replies = world.reply(dict.fromkeys(range(6), "hang") | {6: "go", 7: "raise"})
    assert [replies[n].ended for n in range(8)] == ["time"] * 6 + ["done", "error"]
    assert world.end() == dict.fromkeys([*range(6), 7]) | {6: 6.0}
    assert time.monotonic() - started < 5
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "environment")


@pytest.mark.parametrize("points", ["many", float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_told(points: Any, game: Any) -> None:
    world = Environments(game, workers=1, timeout_s=5)
    world.begin({0: {"points": points}})
    with pytest.raises(ToolError, match="score returned"):
        world.end()
    assert world.live == {}


def test_a_reward_of_a_step_that_is_no_number_is_told(game: Any) -> None:
    world = Environments(game, workers=1, timeout_s=5)
    world.begin({0: {"points": 1}})
    with pytest.raises(ToolError, match="step returned inf"):
        world.reply({0: "infinite"})
    world.close()
