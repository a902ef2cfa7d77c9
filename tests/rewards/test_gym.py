"""reasoning-gym's own scoring, on its own rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import reasoning_gym

Reward = Callable[[str], Callable[..., Any]]


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "leg_counting", "countdown", "spell_backward"])
def test_gold_scores_full_marks_and_nothing_scores_nothing(task: str, reward: Reward) -> None:
    score = reward("gym.score")
    for entry in reasoning_gym.create_dataset(task, size=5, seed=3):
        columns = {"gym_task": task, "gym_entry": json.dumps(entry, default=str)}
        assert score(f"<think>x</think><answer>{entry['answer']}</answer>", **columns) == 1.0
        assert score(f"<think><answer>{entry['answer']}</answer></think>", **columns) == 0.0
        assert score("", **columns) == 0.0


def test_rows_from_elsewhere_abstain(reward: Reward) -> None:
    assert reward("gym.score")("<answer>5</answer>", None, None) is None


def test_an_unknown_task_is_an_error_not_a_zero(reward: Reward) -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        reward("gym.score")("<answer>5</answer>", "no_such_task", "{}")
