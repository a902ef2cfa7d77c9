"""Tool calls in a model's text: the formats of chat templates, told apart by what the template writes.

json: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, Hermes). llama3: a JSON object that is the whole
turn, behind `<|python_tag|>` or not, several divided by `;`. xml:
`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`. A call that cannot be read is a
call too: it is answered with what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain import chat

Format = Literal["json", "llama3", "xml"]


@dataclass(frozen=True)
class Call:
    """One call as it was written. problem: why it cannot be read, "" if it can."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def parse(text: str, form: Format) -> list[Call]:
    """The calls of a model's turn, in order; those within a thought are none."""
    return _PARSERS[form](answer_of(text))


def answer_of(text: str) -> str:
    """The text behind the last `</think>`; nothing, where a thought was opened and not closed."""
    _, found, rest = text.rpartition("</think>")
    answer = rest if found else text
    return answer.partition("<think>")[0]


_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>(.*?)</parameter>", re.DOTALL)


def _json(text: str) -> list[Call]:
    return [_closed(match, _object) for match in _BLOCK.finditer(text)]


def _xml(text: str) -> list[Call]:
    return [_closed(match, _function) for match in _BLOCK.finditer(text)]


def _closed(match: re.Match[str], read: Callable[[str], Call]) -> Call:
    return read(match[1]) if match[2] else Call(problem="the call has no </tool_call>")


def _function(text: str) -> Call:
    found = _FUNCTION.match(text)
    if not found:
        return Call(problem="expected <function=NAME><parameter=KEY>value</parameter></function>")
    return Call(found[1], {key: _value(value) for key, value in _PARAMETER.findall(found[2])})


def _value(text: str) -> Any:
    """A value without its line ends. It is text; what the tool's types make of it is decided when it is called."""
    return text.removeprefix("\n").removesuffix("\n")


class _Unreadable(ValueError):
    """What a model wrote in place of JSON; the message is for the model."""


def _loads(text: str) -> tuple[Any, int]:
    """The JSON value that a text begins with, and where it ends. Raises _Unreadable, also for what only Python refuses:
    brackets without end, numbers of thousands of digits, halves of characters (no file and no tokenizer takes them).
    """
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _Unreadable(error.msg) from None
    except RecursionError:
        raise _Unreadable("nested too deeply") from None
    except UnicodeEncodeError:
        raise _Unreadable("half of a character (\\ud800 to \\udfff)") from None
    except ValueError:
        raise _Unreadable("a number of too many digits") from None
    return value, end


def _loads_all(text: str) -> Any:
    """The JSON value that a text is, blanks aside."""
    stripped = text.strip()
    value, end = _loads(stripped)
    if end < len(stripped):
        raise _Unreadable("text behind it")
    return value


def _llama3(text: str) -> list[Call]:
    plain = text.strip()
    tagged = plain.startswith("<|python_tag|>")
    body = plain.removeprefix("<|python_tag|>").strip()
    if not tagged and not re.match(r"\{\s*\"(name|type)\"\s*:", body):
        return []
    calls: list[Call] = []
    while body:
        try:
            value, end = _loads(body)
        except _Unreadable as error:
            return [*calls, Call(problem=f"no JSON: {error}")]
        calls.append(_read(value))
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return calls or [Call(problem="the call is empty")]


def _object(text: str) -> Call:
    try:
        return _read(_loads_all(text))
    except _Unreadable as error:
        return Call(problem=f"no JSON: {error}")


def _read(value: Any) -> Call:
    if not isinstance(value, dict):
        return Call(problem="expected a JSON object with `name` and `arguments`")
    function = value.get("function")
    inner = function if isinstance(function, dict) else value
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return Call(problem="the call has no `name`")
    if isinstance(arguments, str):
        try:
            arguments = _loads_all(arguments)
        except _Unreadable:
            return Call(name, problem="`arguments` is text and no JSON")
    if not isinstance(arguments, dict):
        return Call(name, problem="`arguments` must be an object")
    return Call(name, arguments)


_PARSERS: dict[Format, Callable[[str], list[Call]]] = {"json": _json, "llama3": _llama3, "xml": _xml}

_EXAMPLE = [{"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "x8name", "arguments": {"x8key": "x8value"}}}
]}]  # fmt: skip


def detect(tokenizer: Any) -> Format:
    """The format that the template writes a call in; json where it writes none, which the prompt then explains."""
    try:
        text = chat.render(tokenizer, [{"role": "user", "content": "x"}, *_EXAMPLE])
    except Exception:
        return "json"
    if "<function=x8name>" in text:
        return "xml"
    return "llama3" if "x8name" in text and "<tool_call>" not in text else "json"


def template_knows_tools(tokenizer: Any, tools: list[dict[str, Any]]) -> bool:
    """Whether the template tells the model about its tools."""
    messages = [{"role": "user", "content": "x"}]
    return chat.render(tokenizer, messages, tools=tools) != chat.render(tokenizer, messages)


_HOW = {
    "json": '<tool_call>{"name": NAME, "arguments": {KEY: VALUE}}</tool_call>',
    "llama3": '{"name": NAME, "parameters": {KEY: VALUE}}',
    "xml": "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
}


def explained(tools: list[dict[str, Any]], form: Format) -> str:
    """What a system message says about tools where the template says nothing."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f"You can call tools:\n{listed}\nTo call one, write {_HOW[form]}"
