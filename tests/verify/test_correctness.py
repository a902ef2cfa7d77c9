"""Which component measures correctness, and which components can."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.recipe.reward_sections import Reward
from posttrain.verify.correctness import can_judge
from posttrain.verify.load import load_reward

SCRIPT = """
def letters(completion): return len(set(completion))
def counts(completions, **kwargs): return [float(len(c)) for c in completions]
def short(completion, token_count): return float(token_count < 5)
def equals(completion, answer): return float(completion == answer)
def of_rows(completions, **kwargs): return [float(c == a) for c, a in zip(completions, kwargs["answer"])]
def of_prompt(completion, prompt): return float(completion in prompt)
def of_world(completion, world_score): return world_score
"""


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("letters", False),
        ("counts", False),
        ("short", False),
        ("equals", True),
        ("of_rows", True),
        ("of_prompt", True),
        ("of_world", True),
    ],
)
def test_completion_only_reward_cannot_measure_correctness(name: str, known: bool, tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text(SCRIPT, encoding="utf-8")
    section = Reward(use=f"{path}:{name}")
    assert can_judge(section, load_reward(section, None)) is known
    marked = Reward(use=f"{path}:{name}", correct=True)
    assert can_judge(marked, load_reward(marked, None))
