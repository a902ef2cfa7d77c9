"""Keys of tools that would do nothing, and components that need turns, are refused with the reason."""

from __future__ import annotations

import re

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.load import load


@pytest.mark.parametrize(
    ("recipe", "change", "told"),
    [
        ("debug/rl", "rollout.max_turns=3", "does nothing without `tools`"),
        ("debug/rl", "tool_format=xml", "`tool_format` does nothing"),
        ("debug/rl", "spread=salt", "needs turn_ids"),
        ("debug/rl", "advantage=gigpo", "needs turn_ids"),
        ("debug/rl", "advantage=per_turn", "turns, or steps of `scoring.split`, and rewards of them"),
        ("debug/tools", "scoring.split=lines", "the parts are the model's turns"),
        ("debug/tools", "advantage=agent", "rollouts of several agents"),
        ("debug/tools", "advantage=mc_critic", "plays from the state before each turn"),
        (
            "debug/tools",
            "tools=[] tool_prompt=auto environment={use: gym, simulations: 5}",
            "nothing reads what states",
        ),
        ("debug/tools", "tools=[{use: calculator}] environment={use: gym}", "either `tools` or `environment`"),
        ("debug/tools", "tools=[{use: a, command: b}]", "either `use` or `command`"),
    ],
)
def test_refused(recipe: str, change: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        load(recipe, re.split(r" (?=\w+=)", change))


def test_turns_are_there_for_what_reads_them() -> None:
    assert load("debug/tools", ["spread=salt"]).recipe.spread.use == "salt"
    both = ["tools=[]", "tool_prompt=auto", "environment={use: gym}", "advantage=information_gain", "spread=null"]
    assert load("debug/tools", both).recipe.advantage.use == "information_gain"
