"""Kinds of tools and conversion of their results: async functions are awaited, an invalid result is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.errors import ToolError
from posttrain.recipe.tool_sections import Tool
from posttrain.tools.call import Call
from posttrain.tools.calls import Caller
from posttrain.tools.load import load_tool, load_tools

SCRIPT = '''
import asyncio, dataclasses, datetime, functools
from decimal import Decimal

async def later(a: int) -> int:
    """Wait, then add one."""
    await asyncio.sleep(0.01)
    return a + 1

async def fails_later() -> str:
    """Wait, then fail."""
    await asyncio.sleep(0)
    raise KeyError("no such town")

async def hangs_later() -> str:
    """Wait for ever."""
    await asyncio.sleep(60)

def decorated(function):
    @functools.wraps(function)
    def outer(*args, **kwargs):
        return function(*args, **kwargs)
    return outer

@decorated
async def wrapped(a: int) -> int:
    """An async function behind a decorator."""
    return a

def returns_coroutine() -> str:
    """A coroutine as the result."""
    return later(1)

def forgets_await() -> dict:
    """A coroutine within the result."""
    return {"a": later(1)}

def returns_generator() -> list:
    """A generator as the result."""
    return (n for n in range(3))

def returns_object() -> str:
    """An object without a text."""
    return object()

def returns_function() -> str:
    """A function as the result."""
    return len

@dataclasses.dataclass
class Town:
    name: str
    since: datetime.date

def returns_values() -> list:
    """Values that JSON does not know, with texts of their own."""
    return [Town("Ulm", datetime.date(854, 7, 22)), Decimal("1.50"), {3, 1}]

def takes_json(numbers: list[int], options: dict) -> int:
    """Arguments that some formats write as texts."""
    return sum(numbers) + len(options)

def yields() -> str:
    """A generator."""
    yield "a"

async def yields_later() -> str:
    """An async generator."""
    yield "a"

class Callable_:
    """An object that can be called."""
    def __call__(self, a: int) -> int:
        return a

called = Callable_()
partial = functools.partial(takes_json, options={})
bound = Callable_().__call__
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kinds")
    (place / "kinds.py").write_text(SCRIPT)
    return place


def test_results_become_text_and_invalid_results_are_errors(folder: Path) -> None:
    wanted = {
        "later": ({"a": 2}, "ok", "3"),
        "wrapped": ({"a": 2}, "ok", "2"),
        "returns_coroutine": ({}, "ok", "2"),
        "fails_later": ({}, "error", "error: KeyError: 'no such town'"),
        "hangs_later": ({}, "timeout", "error: hangs_later took longer than 0.5 s"),
        "forgets_await": ({}, "error", "coroutine"),
        "returns_generator": ({}, "error", "generator"),
        "returns_object": ({}, "error", "object"),
        "returns_function": ({}, "error", "builtin_function_or_method"),
        "returns_values": ({}, "ok", json.dumps([{"name": "Ulm", "since": "0854-07-22"}, "1.50", [1, 3]])),
        "takes_json": ({"numbers": "[1, 2]", "options": '{"a": 1}'}, "ok", "4"),
    }
    tools = load_tools(
        [Tool(use=f"kinds.py:{name}", timeout_s=0.5 if "hangs" in name else 10) for name in wanted], folder
    )
    with Caller(tools, workers=2) as caller:
        found = caller.run([Call(name, arguments) for name, (arguments, _, _) in wanted.items()])
    for result, (_, kind, text) in zip(found, wanted.values(), strict=True):
        assert result.kind == kind and text in result.result, result
        assert " at 0x" not in result.result, result


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("yields", "generator"),
        ("yields_later", "generator"),
        ("Callable_", "not a function"),
        ("called", "not a function"),
        ("partial", "not a function"),
        ("Town", "not a function"),
    ],
)
def test_invalid_tool_is_refused_before_the_run(name: str, why: str, folder: Path) -> None:
    with pytest.raises(ToolError, match=why):
        load_tool(Tool(use=f"kinds.py:{name}"), folder)
