"""A tool call as the model wrote it, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool call as written. problem: why it cannot be read, "" if it can."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


class Unreadable(ValueError):
    """Raised when the model's text is not a valid value; the message is shown to the model."""


def parse_json_at(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value at `at`, after whitespace; returns (value, end position). Raises Unreadable."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unreadable(error.msg) from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError:
        raise Unreadable("a number of too many digits") from None
    return check_json_value(value), end


def check_json_value(value: Any) -> Any:
    """Return the value if JSON and a tokenizer can hold it: no lone surrogate (which no file or tokenizer accepts), no
    infinite number. Raises Unreadable otherwise."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Unreadable("half of a character (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except (TypeError, ValueError):
        raise Unreadable("a number that is infinite, none, or has too many digits") from None
    return value


def parse_json(text: str) -> Any:
    """Parse a text that is one JSON value, apart from whitespace. Raises Unreadable."""
    value, end = parse_json_at(text, 0)
    if text[end:].strip():
        raise Unreadable("text after it")
    return value


def parse_call_object(value: Any) -> Call:
    """Convert a JSON object with `name` and `arguments` or `parameters`, possibly within `function`, to a call."""
    if not isinstance(value, dict):
        return Call(problem="expected a JSON object with `name` and `arguments`")
    function = value.get("function")
    inner = function if isinstance(function, dict) else value
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return Call(problem="the call has no `name`")
    return make_call(name, arguments)


def parse_call_objects(value: Any) -> list[Call]:
    """Convert a JSON object, or a list of them, to calls."""
    return list(map(parse_call_object, value if isinstance(value, list) else [value]))


def make_call(name: str, arguments: Any) -> Call:
    """Build the call of a tool from arguments given as an object, or as JSON text of an object."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except Unreadable:
            return Call(name, problem="`arguments` is text and no JSON")
    if not isinstance(arguments, dict):
        return Call(name, problem="`arguments` must be an object")
    return Call(name, arguments)
