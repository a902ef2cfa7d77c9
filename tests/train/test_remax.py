"""ReMax: one greedy answer a prompt beside the sampled rows, which is scored and not trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.run.metrics import read_metrics
from posttrain.train import rl

from .test_rollout_source import recipe  # noqa: F401  fixture

Values = dict[str, Any]


@pytest.fixture
def first_step(recipe: Callable[..., Any], opened: Any, tmp_path: Path) -> Callable[..., tuple[list[Values], Values]]:  # noqa: F811
    """Return a function that runs a step of a recipe and returns its samples and metrics."""

    (tmp_path / "sums.py").write_text("def letters(completion):\n    return sum(map(ord, completion)) % 97 / 97\n")

    def run(name: str, **changes: Any) -> tuple[list[Values], Values]:
        base = {"run": {"steps": 1, "samples_per_step": 64}, "rewards": [{"use": "sums.py:letters"}]}
        with opened(name) as directory:
            rl.run(recipe(**base, **changes), directory)
        lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], read_metrics(tmp_path / name)[0]

    return run


def test_baseline_is_the_reward_of_the_greedy_answer(first_step: Callable[..., tuple[list[Values], Values]]) -> None:
    """Another run at temperature 0 tells the greedy rewards of the same prompts."""
    greedy, _ = first_step("greedy", rollout={"group_size": 1, "temperature": 0.0}, advantage="reward")
    wanted = {row["prompt"]: row["reward"] for row in greedy}
    rows, metrics = first_step("remax", rollout={"group_size": 3}, advantage="remax")
    assert len(rows) == 3 * len(greedy) and len(set(wanted.values())) > 1
    for row in rows:
        assert row["reward"] - row["advantage"] == pytest.approx(wanted[row["prompt"]])
    assert metrics["greedy/reward"] == pytest.approx(sum(row["reward"] for row in greedy) / len(greedy))
    assert metrics["rollout/rows"] == len(rows)


def test_a_group_may_be_a_single_row(first_step: Callable[..., tuple[list[Values], Values]]) -> None:
    rows, metrics = first_step("single", algorithm="remax")
    assert any(row["advantage"] for row in rows) and metrics["grad_norm"] > 0
