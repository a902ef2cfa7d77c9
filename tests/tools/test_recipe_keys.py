"""Tool keys without effect, and components that need turns, are refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError, ToolError
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.checks import refuse_with_images
from posttrain.recipe.load import load, load_dict
from posttrain.recipe.tool_sections import Environment, Tool
from posttrain.tools.load import load_environment, load_tool
from posttrain.tools.tool_set import load_tool_set


@pytest.mark.parametrize(
    ("recipe", "change", "told"),
    [
        ("debug/rl", "rollout.max_turns=3", "does nothing without `tools`"),
        ("debug/rl", "tool_format=xml", "tool_format: does nothing without"),
        ("debug/rl", "credit_assignment=salt", "needs turn_ids"),
        ("debug/rl", "advantage=gigpo", "needs turn_ids"),
        ("debug/rl", "advantage=per_turn", "turns, or steps of `scoring.split`, and rewards for them"),
        ("debug/tools", "scoring.split=lines", "the parts are the model's turns"),
        ("debug/tools", "advantage=agent", "rollouts of calls by role"),
        ("debug/tools", "advantage=mc_critic", "simulations from the state before each turn"),
        (
            "debug/tools",
            "tools=[] tool_prompt=auto environment={use: gym, simulations: 5} advantage=mc_actions",
            "compares actions in one state",
        ),
        (
            "debug/tools",
            "tools=[] tool_prompt=auto environment={use: gym, simulations: 5}",
            "nothing reads the values of states",
        ),
        ("debug/tools", "tools=[{use: calculator}] environment={use: gym}", "either `tools` or `environment`"),
        ("debug/tools", "tools=[{use: a, command: b}]", "either `use` or `command`"),
    ],
)
def test_refused(recipe: str, change: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        load(recipe, re.split(r" (?=\w+=)", change))


def test_components_that_read_turns_are_accepted_with_tools() -> None:
    assert load("debug/tools", ["credit_assignment=salt"]).recipe.credit_assignment.use == "salt"
    both = [
        "tools=[]",
        "tool_prompt=auto",
        "environment={use: gym}",
        "advantage=information_gain",
        "credit_assignment=null",
    ]
    assert load("debug/tools", both).recipe.advantage.use == "information_gain"


def test_generate_accepts_tools_too() -> None:
    """It has no rewards, so no `scoring` whose parts could replace turns."""
    values = {"stage": "generate", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}}
    loaded = load_dict({**values, "tools": [{"use": "calculator"}]}, base_dir=Path(), where="r.yaml")
    assert loaded.recipe.acts


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"attemps": 2}, r"has no parameter `attemps`\n  it has: attempts, discount\n  hint: did you mean `attempts`"),
        ({"attempts": "many"}, r"parameter `attempts`: .*integer, got 'many'"),
    ],
)
def test_environment_parameters_are_checked(params: dict[str, Any], told: str) -> None:
    with pytest.raises(ToolError, match=told):
        load_environment(Environment(use="gym", params=params), None)


def test_tool_parameter_types_are_checked(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        'def add(a: int, *, offset: float = 0.0) -> float:\n    """Add.\n\n    Args:\n        a: a number\n    """\n'
        "    return a + offset\n"
    )
    assert load_tool(Tool(use="own.py:add", params={"offset": 2}), tmp_path).params == {"offset": 2}
    with pytest.raises(ToolError, match=r"tool add: parameter `offset`: .*number, got 'two'"):
        load_tool(Tool(use="own.py:add", params={"offset": "two"}), tmp_path)


def may_show(folder: Path, **values: Any) -> Any:
    """The recipe, and whether its tools may return images."""
    rest: dict[str, Any] = {
        "stage": "rl",
        "algorithm": "grpo",
        "data": {"source": "rows.jsonl"},
        "rewards": [{"use": "math.accuracy"}],
    }
    rest |= {"model": {"path": "tiny", "lora": {"rank": 4}, "parallel": {"tensor": 2}}, "run": {"steps": 1}}
    recipe = load_dict({**rest, **values}, base_dir=folder, where="r.yaml").recipe
    offer = load_tool_set(recipe, build_tokenizer(), folder)
    assert offer is not None
    return recipe, offer.shows


def test_tools_that_may_return_images_are_refused_where_row_images_are(tmp_path: Path) -> None:
    """Decided by annotation: a command, and functions that return text, numbers or mappings, return no images."""
    start = "from typing import Any\n\n\n"
    for name, annotation in (("a", ""), ("b", " -> list"), ("c", " -> dict"), ("d", " -> list[str] | None")):
        start += f'def {name}(x: int){annotation}:\n    """Look.\n\n    Args:\n        x: a number\n    """\n\n\n'
    (tmp_path / "own.py").write_text(start)
    shows = {name: load_tool(Tool(use=f"own.py:{name}"), tmp_path).shows for name in "abcd"}
    assert shows == {"a": True, "b": True, "c": False, "d": False}
    assert not load_tool(Tool(command="cat", name="cat", description="Read."), tmp_path).shows
    for values, may in (
        ({"tools": [{"use": "calculator"}]}, False),
        ({"tools": [{"use": "calculator"}, {"use": "crop"}]}, True),
        ({"environment": {"use": "gym"}}, False),
        ({"environment": {"use": "screen"}}, True),
    ):
        recipe, found = may_show(tmp_path, **values)
        assert found is may
        refuse_with_images(recipe, [{"prompt": "a"}], replies=False)
    with pytest.raises(RecipeError, match=r"parallel.tensor: tools or the environment may show images, and it"):
        refuse_with_images(recipe, [{"prompt": "a"}], replies=True)
    with pytest.raises(RecipeError, match=r"parallel.tensor: the rows have images, and it divides"):
        refuse_with_images(recipe, [{"images": ["a.png"]}])


def test_tool_description_follows_the_system_message_of_the_row(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"  # does not support tools
    )
    values = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "algorithm": "grpo",
        "data": {"source": "rows.jsonl", "system": "of the recipe"},
        "rewards": [{"use": "math.accuracy"}],
        "tools": [{"use": "calculator"}],
        "run": {"steps": 1},
    }
    recipe = load_dict(values, base_dir=tmp_path, where="r.yaml").recipe
    offer = load_tool_set(recipe, tokenizer, tmp_path)
    assert offer is not None and offer.system is not None
    for row, begins in (
        ({"prompt": "q"}, "of the recipe"),
        ({"prompt": "q", "system": "of the row"}, "of the row"),
        ({"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}], "system": "x"}, "own"),
    ):
        assert offer.row(row)["prompt"][0]["content"] == f"{begins}\n\n{offer.system}"
