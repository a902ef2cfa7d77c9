"""The shipped environment of reasoning-gym tasks: several attempts, reward for the improvement."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from posttrain.data import gym
from posttrain.errors import ToolError
from posttrain.recipe.tool_sections import Environment
from posttrain.tools.environments import Environments, Reply
from posttrain.tools.load import load_environment

pytest.importorskip("reasoning_gym")


def test_attempts_are_discounted() -> None:
    (row,) = gym.rows("chain_sum", 1, 0, {})
    made = load_environment(Environment(use="gym", params={"attempts": 2, "discount": 0.5}), None)
    world = Environments(made, 2, 10.0)

    async def played(*turns: str) -> tuple[list[Reply], float | None]:
        episode = world.episode(0)
        await episode.begin(row)
        replies = [await episode.reply(turn) for turn in turns]
        score = await episode.score()
        await episode.close()
        return replies, score

    async def every() -> Any:
        right = str(row["answer"])
        return await asyncio.gather(
            played(f"<answer>{right}</answer>"), played("<answer>no</answer>", right), played("no", "no")
        )

    at_once, later, never = asyncio.run(every())
    assert at_once[0][0].ended == "done" and at_once[0][0].reward == 1.0
    assert later[0][0].messages[0]["content"] == "That is not right. Try again." and later[0][0].ended == ""
    assert later[0][1].ended == never[0][1].ended == "done"
    assert at_once[1] == 1.0 and later[1] == 0.5 and never[1] < 0.1


def test_rows_of_another_kind_are_reported() -> None:
    world = Environments(load_environment(Environment(use="gym"), None), 1, 5.0)
    with pytest.raises(ToolError, match=r"row a7  the environment cannot begin with this row: KeyError") as told:
        asyncio.run(world.episode(0).begin({"uid": "a7", "prompt": "q", "answer": "1"}))
    assert "its columns: prompt, answer" in str(told.value)
    assert "its `reset` reads a column `gym_task`, which the data lack" in str(told.value)
