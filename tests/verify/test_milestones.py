"""Milestones of programs: marks that a program cannot print itself, run in the sandbox."""

from __future__ import annotations

import pytest

from posttrain.verify.milestones import milestone_reward
from posttrain.verify.sandbox import isolation

pytestmark = pytest.mark.skipif(isolation() != "namespaces", reason="this machine offers no namespaces")


def run(program: str, *milestones: str, **more: object) -> dict[str, float]:
    return milestone_reward(f"```python\n{program}\n```", milestones, **more)  # type: ignore[arg-type]


def test_milestones_reached_before_a_crash_count() -> None:
    program = "import json\nrows = json.loads('[1, 2]')\nfor row in rows:\n    total = row / 0\nprint('trained')"
    assert run(program, r"json\.loads", "total =", "trained") == {"reward": -9.9, "matched": 1.0}


def test_milestone_in_an_untaken_branch_does_not_count() -> None:
    assert run("if False:\n    model = 1\nelse:\n    data = 2", "model =", "data =")["matched"] == 1


def test_mark_printed_by_the_program_does_not_count() -> None:
    assert run("print('model =')\nprint('<milestone 0>')", "model = ")["matched"] == 0


def test_result_gets_its_score_and_a_missing_program_the_base() -> None:
    program = "print('score: 0.25')\nprint('score: 0.5')"
    assert run(program, "print", score_pattern=r"score: ([0-9.]+)")["reward"] == 0.5
    assert run(program + "\n1 / 0", "print", score_pattern=r"score: ([0-9.]+)")["reward"] == -9.9
    assert milestone_reward("no program", ["print"])["reward"] == -10
