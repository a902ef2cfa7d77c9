"""Random plays from a state: their returns by hand, and unchanged state afterwards."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from posttrain.errors import ToolError
from posttrain.recipe.tool_sections import Environment
from posttrain.tools.environments import Environments, Simulations
from posttrain.tools.load import load_environment
from posttrain.tools.simulate import action_returns, mean_return, read_action


class Ladder:
    """Each step up pays 1; the episode ends at the top. There is no other action."""

    def __init__(self, top: int = 3) -> None:
        self.top, self.at = top, 0

    def reset(self, row: Any) -> None:
        self.at = row.get("at", 0)

    def actions(self) -> list[str]:
        return ["up"] if self.at < self.top else []

    def step(self, text: str) -> tuple[str, bool, float]:
        assert text == "up"
        self.at += 1
        return "", self.at == self.top, 1.0

    def score(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("at", "horizon", "value"),
    [(0, 10, 1 + 0.5 + 0.25), (1, 10, 1.5), (0, 2, 1.5), (3, 10, 0.0)],
)
def test_return_of_the_only_play(at: int, horizon: int, value: float) -> None:
    ladder = Ladder()
    ladder.at = at
    assert mean_return(ladder, random.Random(0), plays=4, horizon=horizon, gamma=0.5) == value
    assert ladder.at == at


class Coin(Ladder):
    """Heads pays 1, tails nothing; one throw."""

    def actions(self) -> list[str]:
        return ["heads", "tails"]

    def step(self, text: str) -> tuple[str, bool, float]:
        return "", True, float(text == "heads")


def test_actions_are_sampled_uniformly_by_seed() -> None:
    values = [mean_return(Coin(), random.Random(seed), plays=2000, horizon=1, gamma=1.0) for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]
    assert all(abs(value - 0.5) < 0.05 for value in values)


def test_step_without_a_reward_is_reported() -> None:
    class Silent(Coin):
        def step(self, text: str) -> Any:
            return "", bool(text)

    with pytest.raises(ToolError, match="need the rewards of steps"):
        mean_return(Silent(), random.Random(0), plays=1, horizon=1, gamma=1.0)


def test_episode_records_the_values_of_its_states() -> None:
    async def values(world: Environments, number: int, row: dict[str, Any]) -> list[float | None]:
        episode = world.episode(number)
        await episode.begin(row)
        found = [await episode.value()]
        if row["at"] == 0:
            await episode.reply("up")
            found.append(await episode.value())
        await episode.close()
        return found

    async def every() -> tuple[list[float | None], ...]:
        world = Environments(Ladder, 2, 5.0, Simulations(plays=2, horizon=9, gamma=0.5))
        plain = values(Environments(Ladder, 2, 5.0), 0, {"at": 0})
        return await asyncio.gather(values(world, 0, {"at": 0}), values(world, 4, {"at": 2}), plain)

    assert asyncio.run(every()) == [[1.75, 1.5], [1.0], [None, None]]


def test_simulation_time_out_names_the_recipe_key() -> None:
    over = threading.Event()

    class Slow(Ladder):
        def actions(self) -> list[str]:
            over.wait(30)
            return super().actions()

    async def value() -> None:
        episode = Environments(Slow, 1, 0.3, Simulations(plays=1, horizon=9, gamma=1.0)).episode(0)
        await episode.begin({})
        await episode.value()

    with pytest.raises(ToolError, match=r"simulations of a state took longer than 0.3 s(.|\n)*environment.timeout_s"):
        asyncio.run(value())
    over.set()


def test_class_without_actions_is_refused() -> None:
    with pytest.raises(ToolError, match="has no method `actions`"):
        load_environment(Environment(use="gym", simulations=3), None)


class Fork(Ladder):
    """Left pays 1 and continues to one step up that pays 1; right pays 3 and ends."""

    def actions(self) -> list[str]:
        return {0: ["left", "right"], 1: ["up"]}.get(self.at, [])

    def step(self, text: str) -> tuple[str, bool, float]:
        self.at = {"left": 1}.get(text, 2)
        return "", self.at == 2, {"right": 3.0}.get(text, 1.0)


def test_return_of_each_action() -> None:
    """left: 1 + 1/2 * 1; right ends, so only its reward. The state is unchanged, and a turn is an action or none."""
    fork = Fork()
    assert action_returns(fork, "row", plays=3, horizon=9, gamma=0.5) == {"left": 1.5, "right": 3.0} and fork.at == 0
    assert read_action(fork, " left\n") == "left" and read_action(fork, "up") is None
    fork.action = lambda text: text.split()[-1]  # type: ignore[attr-defined]
    assert read_action(fork, "I go right") == "right"


def test_rollouts_of_a_row_share_the_action_returns() -> None:
    async def every() -> list[Any]:
        world = Environments(Coin, 2, 9.0, Simulations(50, 2, 1.0, of_actions=True))

        async def one(number: int, uid: str) -> Any:
            episode = world.episode(number)
            await episode.begin({"uid": uid})
            found = await episode.returns()
            reply = await episode.reply("heads" if number else "neither")
            await episode.close()
            return found, reply.action, await episode.value()

        return [await one(0, "a"), await one(1, "a"), await one(2, "b")]

    (first, none, value), (second, taken, _), (other, _, _) = asyncio.run(every())
    assert first is second and other == first == {"heads": 1.0, "tails": 0.0}
    assert (none, taken, value) == (None, "heads", None)
