"""Controlled values: invalid ones are refused at the start if they are known then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.recipe.load import load_dict
from posttrain.train.controls import Controls

MINE = """
class Growing:
    '''10 more tokens a step; `read` says whether the metrics are looked at.'''

    def __init__(self, *, read: bool = False):
        self.read = read

    def start(self, initial):
        return {"now": initial}

    def value(self, state, step):
        return state["now"]

    def update(self, state, metrics, step):
        more = 10 if not self.read or metrics.get("reward") is not None else 0
        return {"now": state["now"] + more}
"""
LIMIT = 100


@pytest.fixture
def controls(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(MINE)

    def make(steps: int, key: str = "rollout.max_new_tokens", **controller: Any) -> Controls:
        values = {
            "stage": "rl",
            "model": {"path": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rollout": {"max_new_tokens": LIMIT},
            "rewards": [{"use": "math.accuracy"}],
            "controllers": {key: controller},
            "run": {"steps": max(steps, 1)},
        }
        return Controls.from_recipe(load_dict(values, base_dir=tmp_path, where="test").recipe, steps)

    return make


@pytest.mark.parametrize(
    ("controller", "step", "asked"),
    [
        ({"use": "cosine", "high": 101.0, "low": 10.0}, 1, 101),
        (
            {"use": "cosine", "high": 10.0, "low": 120.0, "total_steps": 4},
            4,
            104,
        ),  # 120 - 110 * (1 + cos(3 pi / 4)) / 2
        ({"use": "mine.py:Growing"}, 2, 110),
    ],
)
def test_controlled_tokens_beyond_the_engines_window_are_refused(
    controls: Any, controller: Any, step: int, asked: int
) -> None:
    with pytest.raises(UserError, match=rf"in step {step} a controller asks for {asked} new tokens, .*{LIMIT}\n.*hint"):
        controls(6, **controller)
    controls(step - 1, **controller)


def test_metric_dependent_values_are_not_checked_at_the_start(controls: Any) -> None:
    made = controls(50, use="mine.py:Growing", read=True)
    assert list(made.predict_values(2)) == [{"rollout.max_new_tokens": LIMIT}, {}]
    controls(50, key="rollout.group_size", use="mine.py:Growing")  # any number of rollouts can be sampled
