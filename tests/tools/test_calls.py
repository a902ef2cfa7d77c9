"""Tools in worker processes: whatever they do, the model gets a text and nothing is left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import ToolError
from posttrain.recipe.rollout_sections import Tool
from posttrain.tools.call import Call
from posttrain.tools.calls import Caller
from posttrain.tools.load import load_tool, load_tools

SCRIPT = '''
import os, time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second
    """
    return a + b

def fails(a: int) -> str:
    """Fail."""
    raise KeyError("no such town")

def hangs() -> str:
    """Hang."""
    time.sleep(60)

def dies() -> str:
    """Die."""
    os._exit(3)

def quits() -> str:
    """Quit."""
    raise SystemExit(0)

def floods() -> str:
    """Print and return a megabyte."""
    print("x" * 1_000_000)
    return "y" * 1_000_000

def scaled(a: float, *, by: float) -> float:
    """Scale."""
    return a * by

def untyped(a) -> str:
    """No type."""

def silent(a: int) -> str:
    return ""
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("with a space")
    (place / "my tools.py").write_text(SCRIPT)
    return place


def tool(function: str, **more: object) -> Tool:
    return Tool.model_validate({"use": f"my tools.py:{function}", **more})


def test_the_schema_is_made_of_signature_and_docstring(folder: Path) -> None:
    assert load_tool(tool("add"), folder).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second", "default": 1},
                },
                "required": ["a"],
            },
        },
    }


def test_what_the_recipe_fixes_is_not_the_models(folder: Path) -> None:
    found = load_tool(tool("scaled", params={"by": 2.0}), folder)
    assert found.arguments == ["a"] and found.params == {"by": 2.0}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (tool("untyped"), "`a` has no type"),
        (tool("silent"), "no docstring"),
        (tool("scaled"), "needs params.by"),
        (tool("scaled", params={"bye": 1}), "did you mean `by`"),
        (tool("adds"), "adds"),
        (Tool(use="calculater"), "did you mean `calculator`"),
        (Tool(use="nowhere.py:f"), "tool script not found"),
        (Tool(command="no-such-command"), "no command"),
        (Tool(command="cat"), "needs a `name`"),
    ],
)
def test_mistakes_are_told(section: Tool, told: str, folder: Path) -> None:
    with pytest.raises(ToolError, match=told):
        load_tool(section, folder)


def test_two_tools_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(ToolError, match="two tools are called `add`"):
        load_tools([tool("add"), tool("fails", name="add")], folder)


def test_every_call_is_answered_and_counted(folder: Path) -> None:
    """One of each kind at once, in two workers, and a good call behind each bad one."""
    sections = [tool("add"), tool("fails"), tool("hangs", timeout_s=0.5), tool("dies"), tool("quits")]
    sections += [tool("floods", max_chars=100), Tool(command="tr a-z A-Z", name="upper", description="Shout.")]
    calls = {
        "a number as text": (Call("add", {"a": "2", "b": 3}), "ok", "5"),
        "raises": (Call("fails", {"a": 1}), "error", "error: KeyError: 'no such town'"),
        "hangs": (Call("hangs"), "timeout", "error: hangs took longer than 0.5 s"),
        "dies": (Call("dies"), "error", "exit code 3"),
        "quits": (Call("quits"), "error", "SystemExit"),
        "floods": (Call("floods"), "ok", "999900 characters left out"),
        "command": (Call("upper", {"input": "hm"}), "ok", "HM"),
        "unknown": (Call("sub", {}), "unknown", "no tool `sub`; there are: add"),
        "missing": (Call("add", {}), "malformed", "add needs `a`"),
        "too many": (Call("add", {"a": 1, "c": 2}), "malformed", "no argument `c`"),
        "wrong type": (Call("add", {"a": "x"}), "error", "argument `a`"),
        "unreadable": (Call(problem="no JSON"), "malformed", "cannot be read: no JSON"),
        "after all": (Call("add", {"a": 1}), "ok", "2"),
    }
    with Caller(load_tools(sections, folder), workers=2) as caller:
        found = caller.run([call for call, _, _ in calls.values()])
    assert caller.pool.workers == []
    for (name, (_, kind, text)), result in zip(calls.items(), found, strict=True):
        assert result.kind == kind and text in result.result, (name, result)
    assert len(found[5].result) < 150
