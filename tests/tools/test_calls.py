"""Tools in worker processes: in every case the model gets a text and no process is left running."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from posttrain.errors import RunError, ToolError
from posttrain.recipe.tool_sections import Tool
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

def waits(here: str, there: str = "") -> str:
    """Leave a file, and wait for another."""
    open(here, "w").close()
    while there and not os.path.exists(there):
        time.sleep(0.005)
    return here

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


def test_schema_comes_from_signature_and_docstring(folder: Path) -> None:
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


def test_arguments_set_by_the_recipe_are_hidden_from_the_model(folder: Path) -> None:
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
def test_mistakes_are_reported(section: Tool, told: str, folder: Path) -> None:
    with pytest.raises(ToolError, match=told):
        load_tool(section, folder)


def test_two_tools_with_the_same_name_are_refused(folder: Path) -> None:
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
    assert [worker for pool in caller.pools for worker in pool.workers] == []
    for (name, (_, kind, text)), result in zip(calls.items(), found, strict=True):
        assert result.kind == kind and text in result.result, (name, result)
    assert len(found[5].result) < 150


def test_call_starts_immediately_if_a_worker_is_free(folder: Path, tmp_path: Path) -> None:
    """The first call ends when the last one has been made; all others are answered by the second worker, in order."""
    names = [str(tmp_path / str(n)) for n in range(6)]

    async def every(caller: Caller) -> list[str]:
        answered = []

        async def one(n: int) -> None:
            there = names[-1] if n == 0 else ""
            answered.append((await caller.answer(Call("waits", {"here": names[n], "there": there}))).result)

        await asyncio.gather(*(one(n) for n in range(6)))
        return answered

    with Caller(load_tools([tool("waits", timeout_s=30)], folder), workers=2) as caller:
        answered = asyncio.run(every(caller))
    assert sorted(answered) == names and answered[:4] == names[1:5]


def test_cancelled_call_ends_its_worker_and_the_next_call_is_answered(folder: Path, tmp_path: Path) -> None:
    here, never = tmp_path / "here", str(tmp_path / "never")

    async def cancelled(caller: Caller) -> int:
        """Return the process that ran the call."""
        call = asyncio.ensure_future(caller.answer(Call("waits", {"here": str(here), "there": never})))
        while not here.exists():
            await asyncio.sleep(0.01)
        pid = caller.pools[0].workers[0].process.pid
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        return pid

    started = time.monotonic()
    with Caller(load_tools([tool("waits", timeout_s=300), tool("add")], folder), workers=1) as caller:
        pid = asyncio.run(cancelled(caller))
        assert caller.run([Call("add", {"a": 1})])[0].result == "2"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        asyncio.run(cancelled_at_once(caller, here))
        assert caller.run([Call("add", {"a": 2})])[0].result == "3"
    assert time.monotonic() - started < 100


async def cancelled_at_once(caller: Caller, here: Path) -> None:
    """A call that may have reached its thread or not, and one behind it."""
    calls = [asyncio.ensure_future(caller.answer(Call("waits", {"here": str(here)}))) for _ in range(2)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


def test_close_ends_running_calls(folder: Path, tmp_path: Path) -> None:
    here, started = tmp_path / "here", time.monotonic()
    caller = Caller(load_tools([tool("waits", timeout_s=300)], folder), workers=2)
    caller.__enter__()
    call = Call("waits", {"here": str(here), "there": str(tmp_path / "never")})
    raised: list[type[BaseException]] = []

    def run() -> None:
        try:
            caller.run([call] * 3)
        except BaseException as error:
            raised.append(type(error))

    answers = threading.Thread(target=run, daemon=True)
    answers.start()
    while not here.exists():
        time.sleep(0.01)
    caller.close()
    caller.close()
    answers.join(30)
    assert raised == [RunError] and time.monotonic() - started < 100
    assert [worker for pool in caller.pools for worker in pool.workers] == []
