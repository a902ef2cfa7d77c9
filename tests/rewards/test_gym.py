"""reasoning-gym's own scoring on its own rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import reasoning_gym

from posttrain import typed_json
from posttrain.data import gym as data

Reward = Callable[[str], Callable[..., Any]]


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "leg_counting", "countdown", "spell_backward"])
def test_gold_answer_scores_1_and_empty_answer_scores_0(task: str, reward: Reward) -> None:
    score = reward("gym.score")
    for entry in reasoning_gym.create_dataset(task, size=5, seed=3):
        columns = {"gym_task": task, "gym_entry": typed_json.dumps(entry)}
        assert score(f"<think>x</think><answer>{entry['answer']}</answer>", **columns) == 1.0
        assert score(f"<think><answer>{entry['answer']}</answer></think>", **columns) == 0.0
        assert score("", **columns) == 0.0


def test_rows_of_other_sources_get_none(reward: Reward) -> None:
    assert reward("gym.score")("<answer>5</answer>", None, None) is None


def test_unknown_task_raises(reward: Reward) -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        reward("gym.score")("<answer>5</answer>", "no_such_task", "{}")


@pytest.mark.parametrize("task", ["arc_agi", "rearc", "graph_color", "codeio", "futoshiki"])
def test_rows_keep_the_types_of_an_entry(task: str, reward: Reward) -> None:
    """Boards of the arc tasks are tuples, and a list is not equal to one."""
    for row in data.rows(task, 3, 0, {}):
        entry = typed_json.loads(row["gym_entry"])
        gold = entry["answer"]
        if task == "graph_color":
            gold = json.dumps({str(k): v for k, v in entry["metadata"]["possible_answer"].items()})
        columns = {"gym_task": task, "gym_entry": row["gym_entry"]}
        assert reward("gym.score")(f"<answer>{gold}</answer>", **columns) == 1.0


def test_row_params_configure_the_task(reward: Reward) -> None:
    params = {"min_num_decimal_places": 8, "max_num_decimal_places": 10}
    (row,) = data.rows("decimal_arithmetic", 1, 0, params)
    said = f"<answer>{float(row['answer']) + 5e-4}</answer>"
    columns = {name: row[name] for name in ("gym_task", "gym_entry", "gym_params")}
    assert reward("gym.score")(said, **columns) == 0.0
    assert reward("gym.score")(said, columns["gym_task"], columns["gym_entry"]) == 1.0
