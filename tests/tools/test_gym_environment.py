"""The shipped environment of reasoning-gym tasks: several attempts, credit for the gain."""

from __future__ import annotations

import pytest

from posttrain.data import gym
from posttrain.errors import ToolError
from posttrain.recipe.rollout_sections import Environment
from posttrain.tools.load import environment_class
from posttrain.tools.worlds import Environments

pytest.importorskip("reasoning_gym")


def test_attempts_and_their_discount() -> None:
    (row,) = gym.rows("chain_sum", 1, 0, {})
    made = environment_class(Environment(use="gym", params={"attempts": 2, "discount": 0.5}), None)
    world = Environments(made, 2, 10.0)
    world.begin({0: row, 1: row, 2: row})
    first = world.reply({0: f"<answer>{row['answer']}</answer>", 1: "<answer>no</answer>", 2: "no"})
    assert first[0].ended == "done" and first[0].reward == 1.0
    assert first[1].messages[0]["content"] == "That is not right. Try again." and first[1].ended == ""
    second = world.reply({1: str(row["answer"]), 2: "no"})
    assert second[1].ended == second[2].ended == "done"
    scores = world.end()
    assert scores[0] == 1.0 and scores[1] == 0.5 and scores[2] < 0.1
    world.close()


def test_rows_of_another_kind_are_told() -> None:
    worlds = Environments(environment_class(Environment(use="gym"), None), 1, 5.0)
    try:
        with pytest.raises(ToolError, match=r"row a7  the environment cannot begin with this row: KeyError") as told:
            worlds.begin({0: {"uid": "a7", "prompt": "q", "answer": "1"}})
        assert "its columns: prompt, answer" in str(told.value)
        assert "its `reset` reads a column `gym_task`, which the data lack" in str(told.value)
    finally:
        worlds.close()
