"""The side of a tool call that runs in a worker process. Imports nothing heavy but what the tools import."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import subprocess
import typing
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from posttrain.registry import load_function

MARK = "\x00error:"  # before the text of what a tool raised
ERROR_CHARS = 300


def invoke(text: str, *, target: str, fixed: Mapping[str, Any], max_chars: int) -> str:
    """In the worker: call the tool with arguments as JSON text. What it raises comes back as text."""
    function = load_function(target, None, what="tool")
    try:
        given = convert_arguments(function, json.loads(text))
        value = function(**given, **fixed)
        if inspect.isawaitable(value):
            value = asyncio.run(await_result(value))
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=to_json_text)
    except Exception as error:
        return MARK + f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    if len(written) > max_chars:
        written = written[:max_chars] + f"... ({len(written) - max_chars} characters left out)"
    return written


async def await_result(value: Awaitable[Any]) -> Any:
    """What an async tool returns."""
    return await value


def to_json_text(value: Any) -> Any:
    """What stands in JSON for a value that JSON does not know. Raises TypeError for one that has no text of its own:
    coroutines, generators, functions, and objects of which Python would show the address."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    plain = type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__
    if plain or callable(value) or hasattr(value, "__next__") or hasattr(value, "__anext__"):
        raise TypeError(f"the tool returned {type(value).__name__}, which is no text, number, list or dict")
    if inspect.isawaitable(value):
        raise TypeError("the tool returned a coroutine within its result; await it")
    return str(value)


def convert_arguments(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the types of the function: models write "3" for 3. Raises ValueError naming the argument."""
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(function)
    found = {}
    for name, value in given.items():
        try:
            found[name] = _as_type(TypeAdapter(hints[name]), value) if name in hints else value
        except ValidationError as error:
            raise ValueError(f"argument `{name}`: {error.errors(include_url=False)[0]['msg']}") from None
    return found


def _as_type(adapter: Any, value: Any) -> Any:
    """The value as the type; a text that is none may be the JSON of one."""
    from pydantic import ValidationError

    try:
        return adapter.validate_python(value)
    except ValidationError:
        if not isinstance(value, str):
            raise
        try:
            return adapter.validate_json(value)
        except ValidationError:
            pass
        raise


def command(input: str, *, words: Sequence[str], seconds: float, max_chars: int) -> str:
    """A command as a tool: its standard output; ValueError with its last line of errors where it fails."""
    try:
        done = subprocess.run(list(words), input=input, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"took longer than {seconds:g} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout[: max_chars + 1]
