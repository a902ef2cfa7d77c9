"""Random plays from a state: what they earn, by hand, and what they leave as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest

from posttrain.errors import ToolError
from posttrain.recipe.rollout_sections import Environment
from posttrain.tools.load import environment_class
from posttrain.tools.simulate import mean_return
from posttrain.tools.worlds import Environments, Simulations


class Ladder:
    """Each step up pays 1; at the top it is over. Nothing else can be done."""

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
def test_the_return_of_the_only_play(at: int, horizon: int, value: float) -> None:
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


def test_actions_are_drawn_evenly_and_by_seed() -> None:
    values = [mean_return(Coin(), random.Random(seed), plays=2000, horizon=1, gamma=1.0) for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]
    assert all(abs(value - 0.5) < 0.05 for value in values)


def test_a_step_without_a_reward_is_told() -> None:
    class Silent(Coin):
        def step(self, text: str) -> Any:
            return "", bool(text)

    with pytest.raises(ToolError, match="need the rewards of steps"):
        mean_return(Silent(), random.Random(0), plays=1, horizon=1, gamma=1.0)


def test_a_world_says_what_its_states_are_worth() -> None:
    world = Environments(Ladder, 2, 5.0, Simulations(plays=2, horizon=9, gamma=0.5))
    world.begin({0: {"at": 0}, 4: {"at": 2}})
    assert world.values([0, 4]) == {0: 1.75, 4: 1.0}
    world.reply({0: "up"})
    assert world.values([0]) == {0: 1.5}
    world.close()
    plain = Environments(Ladder, 2, 5.0)
    assert plain.values([0]) == {}
    plain.close()


def test_a_class_without_actions_is_refused() -> None:
    with pytest.raises(ToolError, match="has no method `actions`"):
        environment_class(Environment(use="gym", simulations=3), None)
