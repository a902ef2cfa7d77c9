"""`posttrain tool test`, and tools of a recipe that are told before anything is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

TOOLS = '''
import time

def slow(seconds: float, times: int = 1) -> str:
    """Wait.

    Args:
        seconds: to wait
    """
    time.sleep(seconds)
    return "x" * 50 * times

def fails(word: str) -> str:
    """Fail."""
    raise LookupError(f"no {word}")

EXAMPLES = {
    "slow": [({"seconds": 0}, "x" * 50), ({"seconds": "long"}, ValueError)],
    "fails": [({"word": "moon"}, LookupError), ({"word": "sun"}, "bright")],
}
'''


@pytest.fixture(autouse=True)
def tools(folder: Path) -> None:
    (folder / "my tools.py").write_text(TOOLS, encoding="utf-8")


def test_tool_schema_and_results_are_printed(call: Call) -> None:
    result = call("tool", "test", "my tools.py:slow", "seconds=0", "times=3", "--max-chars", "60")
    assert result.exit_code == 0, result.output
    assert "slow: Wait.\n  seconds (number, required): to wait\n  times (integer, default 1): no desc" in result.stdout
    assert f"  {'x' * 60}... (90 characters left out)" in result.stdout
    assert "without `seconds` (malformed): error: slow needs `seconds`" in result.stdout
    assert "(malformed): error: slow has no argument `surprise`: seconds, times" in result.stdout
    assert "with a text for `seconds` (error): error: ValueError: argument `seconds`" in result.stdout


def test_call_over_its_time_limit_is_ended_with_exit_code_2(call: Call) -> None:
    result = call("tool", "test", "my tools.py:slow", '{"seconds": 60}', "--timeout", "1")
    assert result.exit_code == 2
    assert "2 of 2 examples right\ntimeout, " in result.stdout
    assert "error: slow took longer than 1 s" in result.stdout


def test_all_tools_of_a_file_as_json(call: Call) -> None:
    result = call("tool", "test", "my tools.py", "--json")
    assert result.exit_code == 2
    slow, fails = json.loads(result.stdout)
    assert slow["schema"]["name"] == "slow" and [one["ok"] for one in slow["examples"]] == [True, True]
    assert [(one["ok"], one["result"]) for one in fails["examples"]] == [
        (True, "error: LookupError: no moon"),
        (False, "error: LookupError: no sun"),
    ]


def test_shipped_tool_passes_its_examples(call: Call) -> None:
    result = call("tool", "test", "search", "query=Ulm")
    assert result.exit_code == 0, result.output
    assert "3 of 3 examples right\nok, " in result.stdout
    assert "  [1] Ulm lies on the Danube." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["my tools.py", "seconds=1"], "holds several tools: slow, fails"),
        (["calculater"], "did you mean `calculator`?"),
        (["calculator", "1+1"], "an argument is `1+1`"),
        (["calculator", '{"a": '], "not a JSON object"),
        (["gone.py"], "tool not found: gone.py"),
        (["calculator", "--param", "x=1"], "has no parameter `x`"),
    ],
)
def test_invalid_arguments_raise(arguments: list[str], told: str, call: Call) -> None:
    result = call("tool", "test", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


RL = "stage: rl\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrewards: [{use: math.accuracy}]\nrun: {steps: 1}\n"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("tools: [{use: calculater}]", ["t.yaml:6:15  tools.0.use: unknown tool: calculater", "did you mean `calcul"]),
        ("tools: [{use: calculator}, {use: gone.py:f}]", ["t.yaml:6:34  tools.1.use: tool script not found: gone.py"]),
        (
            "tools: [{use: calculator}, {use: calculator}]",
            ["t.yaml:6:34  tools.1.use: two tools are called `calculator`"],
        ),
        ("tools: [{use: search}]", ["tools.0.use: tool search needs params.folder"]),
        ("environment: {use: gymn}", ["environment.use: unknown environment: gymn", "did you mean `gym`?"]),
    ],
)
def test_invalid_tool_creates_no_run_directory(written: str, told: list[str], folder: Path, call: Call) -> None:
    (folder / "t.yaml").write_text(RL + written, encoding="utf-8")
    before = sorted(folder.iterdir())
    result = call("rl", "t.yaml")
    assert result.exit_code == 2
    assert all(text in result.stderr for text in told), result.stderr
    assert sorted(folder.iterdir()) == before
