"""The side of a tool call that runs in a worker process. Imports nothing heavy but what the tools import."""

from __future__ import annotations

import json
import subprocess
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.registry import load_function

MARK = "\x00error:"  # before the text of what a tool raised
ERROR_CHARS = 300


def invoke(text: str, *, target: str, fixed: Mapping[str, Any], max_chars: int) -> str:
    """In the worker: call the tool with arguments as JSON text. What it raises comes back as text."""
    function = load_function(target, None, what="tool")
    try:
        given = converted(function, json.loads(text))
        value = function(**given, **fixed)
    except Exception as error:
        return MARK + f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(written) > max_chars:
        written = written[:max_chars] + f"... ({len(written) - max_chars} characters left out)"
    return written


def converted(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the types of the function: models write "3" for 3. Raises ValueError naming the argument."""
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(function)
    found = {}
    for name, value in given.items():
        try:
            found[name] = TypeAdapter(hints[name]).validate_python(value) if name in hints else value
        except ValidationError as error:
            raise ValueError(f"argument `{name}`: {error.errors(include_url=False)[0]['msg']}") from None
    return found


def command(input: str, *, words: Sequence[str], seconds: float, max_chars: int) -> str:
    """A command as a tool: its standard output; ValueError with its last line of errors where it fails."""
    try:
        done = subprocess.run(list(words), input=input, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"took longer than {seconds:g} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout[: max_chars + 1]
