"""Worker-process side of a tool call. Imports nothing heavy except what the tools import."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import subprocess
import typing
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from posttrain.images import Image, join_parts, split_pictures
from posttrain.registry import load_function

ERROR_PREFIX = "\x00error:"  # prefix of the text of a tool's exception
IMAGES_PREFIX = "\x00images:"  # prefix of a JSON list: a result's text and its images
ERROR_CHARS = 300


def invoke(text: str, *, target: str, fixed: Mapping[str, Any], max_chars: int, max_pixels: int, **seen: Any) -> str:
    """Call the tool, in the worker, with arguments given as JSON text. An exception is returned as text.

    seen: the images of the conversation, as `images`, for a tool that takes them.
    """
    function = load_function(target, None, what="tool")
    try:
        given = convert_arguments(function, json.loads(text))
        value = function(**given, **fixed, **seen)
        if inspect.isawaitable(value):
            value = asyncio.run(await_result(value))
        parts = [
            part if isinstance(part, str | Image) else json.dumps(part, ensure_ascii=False, default=to_json_text)
            for part in split_pictures(value, max_pixels)
        ]
    except Exception as error:
        return ERROR_PREFIX + f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    shown = _shorten(parts, max_chars)
    text, images = join_parts(shown) if len(parts) > 1 or isinstance(parts[0], Image) else (str(shown[0]), ())
    return IMAGES_PREFIX + json.dumps([text, [image.source for image in images]]) if images else text


def _shorten(parts: Sequence[str | Image], max_chars: int) -> list[str | Image]:
    """Truncate parts to max_chars characters in total; a truncated text states how many characters are left out."""
    kept: list[str | Image] = []
    for part in parts:
        if isinstance(part, str):
            more = len(part) - max_chars
            kept.append(f"{part[:max_chars]}... ({more} characters left out)" if more > 0 else part)
            max_chars = max(max_chars - len(part), 0)
        else:
            kept.append(part)
    return kept


def read_images(text: str) -> tuple[str, tuple[Image, ...]]:
    """Split a tool's result into the text for the model, with PLACE for each image, and the images."""
    if not text.startswith(IMAGES_PREFIX):
        return text, ()
    shown, sources = json.loads(text.removeprefix(IMAGES_PREFIX))
    return shown, tuple(map(Image, sources))


async def await_result(value: Awaitable[Any]) -> Any:
    """Await the result of an async tool."""
    return await value


def to_json_text(value: Any) -> Any:
    """Convert a value that JSON cannot represent, for `json.dumps(default=)`. Raises TypeError for a value without a
    meaningful text: coroutines, generators, functions, and objects whose repr would show an address."""
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
    """Convert arguments to the types of the function: models write "3" for 3. Raises ValueError naming the argument."""
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(function)
    converted = {}
    for name, value in given.items():
        try:
            converted[name] = _convert(TypeAdapter(hints[name]), value) if name in hints else value
        except ValidationError as error:
            raise ValueError(f"argument `{name}`: {error.errors(include_url=False)[0]['msg']}") from None
    return converted


def _convert(adapter: Any, value: Any) -> Any:
    """Validate a value against a type; a string that does not fit is tried as JSON."""
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
    """Run a command as a tool: returns its standard output; ValueError with its last line of stderr if it fails."""
    try:
        done = subprocess.run(list(words), input=input, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"took longer than {seconds:g} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout[: max_chars + 1]
