"""Tests of a tool without a model: its EXAMPLES, and its answers to correct and wrong calls.

    EXAMPLES = [({"celsius": 20}, "68.0"), ({"celsius": "warm"}, ValueError), (arguments, expected, params), ...]

in a file with one tool; with several tools, a dict `{"tool": [...], ...}`. If `expected` is an exception, the call must
fail. A function `sample(folder)` in the script may create what the examples need there and return it as parameters.
Calls run as in training: JSON in, worker processes, limits, text out.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.batch import ToolCall
from posttrain.errors import ToolError
from posttrain.registry import load_module
from posttrain.tools.call import Call
from posttrain.tools.calls import Caller
from posttrain.tools.load import LoadedTool, locate
from posttrain.verify.worker import Call as Work


@dataclass(frozen=True)
class ToolTrial:
    """One tested call. what: its purpose; ok: whether it met the expectation, None = none; seconds: total time."""

    what: str
    call: ToolCall
    seconds: float
    ok: bool | None = None
    expected: str = ""


def list_tools(path: Path) -> list[str]:
    """Return the tools of a file: those in EXAMPLES, else its public functions with a docstring, in order."""
    module = load_module(path)
    written = getattr(module, "EXAMPLES", None)
    if isinstance(written, Mapping):
        return list(written)
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if path.stem in functions:
        return [path.stem]
    names = [name for name in functions if inspect.getdoc(getattr(module, name))]
    if not names:
        raise ToolError("no function with a docstring", where=str(path), hint="the model reads it: say what it does")
    return names


def read_examples(tool: LoadedTool, alone: bool) -> list[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Return (arguments, expected, params) of a tool's EXAMPLES; [] if none. alone: whether a list is for this tool."""
    file, _, name = tool.target.rpartition(":")
    written = getattr(load_module(Path(file)), "EXAMPLES", []) if file.endswith(".py") else []
    lines = written.get(name, []) if isinstance(written, Mapping) else written if alone else []
    for line in lines:
        if not isinstance(line, tuple) or len(line) not in (2, 3) or not isinstance(line[0], Mapping):
            raise ToolError(
                f"not an example: {line!r:.80}", where=file, allowed='({"argument": value}, expected[, params])'
            )
    return [(dict(line[0]), line[1], dict(line[2]) if len(line) > 2 else {}) for line in lines]


def make_sample_params(use: str, folder: Path) -> dict[str, Any]:
    """Return the parameters that the script's `sample` makes for its examples, with files in `folder`; {} without."""
    file = locate(use, Path.cwd()).rpartition(":")[0]
    make = getattr(load_module(Path(file)), "sample", None) if file.endswith(".py") else None
    return dict(make(folder)) if callable(make) else {}


def try_examples(tool: LoadedTool, alone: bool) -> list[ToolTrial]:
    """Run the tool's EXAMPLES; an example's params override those of the tool."""
    trials = []
    for arguments, expected, params in read_examples(tool, alone):
        trial = run_calls(replace(tool, params={**tool.params, **params}), [("example", arguments)])[0]
        fails = isinstance(expected, type) and issubclass(expected, BaseException)
        wanted = expected.__name__ if fails else expected if isinstance(expected, str) else json.dumps(expected)
        ok = trial.call.kind != "ok" if fails else trial.call.kind == "ok" and trial.call.result == wanted
        trials.append(replace(trial, ok=ok, expected=wanted))
    return trials


def try_wrong(tool: LoadedTool, arguments: Mapping[str, Any]) -> list[ToolTrial]:
    """Run wrong calls, to show what a model gets back: an argument missing, one too many, one of the wrong type.

    arguments: those of a correct call; missing ones are generated from the schema.
    """
    properties = tool.schema["function"]["parameters"]["properties"]
    arguments = {**{name: _example_value(properties[name]) for name in tool.required_arguments}, **arguments}
    calls: list[tuple[str, dict[str, Any]]] = []
    if tool.required_arguments:
        left = {name: value for name, value in arguments.items() if name != tool.required_arguments[0]}
        calls.append((f"without `{tool.required_arguments[0]}`", left))
    calls.append(("with an argument that it does not have", {**arguments, "surprise": 1}))
    if other := next(
        (n for n in tool.arguments if properties[n].get("type") in ("integer", "number", "boolean")), None
    ):
        calls.append((f"with a text for `{other}`", {**arguments, other: "not a number"}))
    return run_calls(tool, calls)


def _example_value(about: Mapping[str, Any]) -> Any:
    """Return a value of the schema's type."""
    return {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}.get(str(about.get("type")), "text")


def run_calls(tool: LoadedTool, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[ToolTrial]:
    """Run the calls one after the other in a warmed-up worker."""
    trials = []
    with Caller([tool], workers=1) as caller:
        caller.pools[0].run([Work(0, 0, "{}" if tool.required_arguments else "", {})])  # fails, but loads everything
        for what, arguments in calls:
            started = time.monotonic()
            (done,) = caller.run([Call(tool.name, arguments)])
            trials.append(ToolTrial(what, done, time.monotonic() - started))
    return trials
