"""Parsers of formats that write calls like code: pythonic, `[NAME(key=value)]`, and gemma, `call:NAME{key:value}`."""

from __future__ import annotations

import ast
import re
from typing import Any

from posttrain.tools.call import Call, Unreadable, check_json_value, parse_call_objects, parse_json
from posttrain.tools.json_calls import Found

_CLOSES = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_NAMES = {"true": True, "false": False, "null": None, "none": None}
_MAX_END_MARKS = 20  # maximum end marks tried as the end of a call, because arguments may contain them


def read_pythonic(match: re.Match[str]) -> Found:
    """Parse `[NAME(key=value), ...]`, between marks or as the whole turn. Unescaped strings end at their last quote."""
    text, close = match.string, _CLOSES.get(match[0].strip())
    if close is None:
        end = text.rfind("]") + 1
        if text[end:].strip():
            return [Call(problem="text after the call")], len(text)
        return _parse_pythonic(text[match.end() : end]), len(text)
    ends: list[int] = []
    at = match.end()
    while len(ends) < _MAX_END_MARKS and (found := text.find(close, at)) >= 0:
        ends.append(found)
        at = found + len(close)
    if not ends:
        return [Call(problem=f"the call has no {close}")], len(text)
    for end in ends:
        calls = _parse_pythonic(text[match.end() : end])
        if not any(call.problem for call in calls):
            return calls, end + len(close)
    return _parse_pythonic(text[match.end() : ends[0]]), ends[0] + len(close)


def _parse_pythonic(text: str) -> list[Call]:
    """Parse `[NAME(key=value), ...]`, or the JSON that LFM2 writes between its marks on request."""
    form = "expected [NAME(key=value)]"
    if re.match(r"\s*\[?\s*\{", text):
        try:
            return parse_call_objects(parse_json(text))
        except Unreadable as error:
            return [Call(problem=f"no JSON: {error}")]
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _read_unescaped(text.strip()) or [Call(problem=form)]
    return [_parse_call_node(node) for node in body.elts] if isinstance(body, ast.List) else [Call(problem=form)]


def _parse_call_node(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return Call(problem="expected [NAME(key=value)]")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Call(name, problem="arguments need names: NAME(key=value)")
    try:
        return Call(
            name, check_json_value({str(keyword.arg): _parse_literal(keyword.value) for keyword in node.keywords})
        )
    except Unreadable as error:
        return Call(name, problem=str(error))
    except RecursionError:
        return Call(name, problem="nested too deeply")


def parse_literal(text: str) -> Any:
    """Parse a text that is one Python literal, as a JSON value: `{'a': True}`. Raises Unreadable."""
    try:
        return check_json_value(_parse_literal(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable("no literal") from error


def _parse_literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_parse_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {str(key.value): _parse_literal(element) for key, element in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _parse_literal(node.operand)
        if isinstance(value, int | float):
            return -value
    raise Unreadable("an argument is no value, list or dict")


_TEXT = re.compile(
    r"(?P<key>[A-Za-z_]\w*)=(?P<quote>['\"])(?P<text>.*?)(?P=quote)(?=,\s*[A-Za-z_]\w*=|\)(?:,\s*[\w.]+\(|\]\Z))",
    re.DOTALL,
)


def _read_unescaped(text: str) -> list[Call]:
    """Escape strings with bare quotes or line breaks, as some templates write them, then parse; [] if that fails."""
    fixed = _TEXT.sub(lambda match: f"{match['key']}={match['text']!r}", text)
    try:
        body = ast.parse(fixed, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [_parse_call_node(node) for node in body.elts] if isinstance(body, ast.List) else []


_QUOTE = '<|"|>'
_PLAIN = re.compile(r"-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)|true|false|null|None|True|False")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
DEPTH = 50


def read_gemma(match: re.Match[str]) -> Found:
    """Parse `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`."""
    text, close = match.string, "<tool_call|>"
    try:
        arguments, end = _parse_gemma_object(text, match.end(), 0)
        if not text.startswith(close, end):
            raise Unreadable(f"the call has no {close}")
        return [Call(match["name"], check_json_value(arguments))], end + len(close)
    except Unreadable as error:
        end = text.find(close, match.end())
        return [Call(problem=str(error))], len(text) if end < 0 else end + len(close)


def _parse_gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > DEPTH:
        raise Unreadable("nested too deeply")
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise Unreadable("a text has no end")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text.startswith("{", at):
        return _parse_gemma_object(text, at + 1, depth)
    if text.startswith("[", at):
        entries, at = [], at + 1
        while not text.startswith("]", at):
            entry, at = _parse_gemma_value(text, at, depth + 1)
            entries.append(entry)
            at = _skip_comma(text, at, "]")
        return entries, at + 1
    plain = _PLAIN.match(text, at)
    if plain is None:
        raise Unreadable("an argument is no text, number, list or object")
    word = plain[0]
    return _WORDS[word] if word in _WORDS else _number(word), plain.end()


def _number(word: str) -> float | int:
    try:
        return int(word) if word.lstrip("-").isdigit() else float(word)
    except ValueError:
        raise Unreadable("a number of too many digits") from None


def _parse_gemma_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    """Parse an object after its `{`; returns the object and the position after it."""
    entries: dict[str, Any] = {}
    while not text.startswith("}", at):
        if text.startswith(_QUOTE, at):  # keys of nested objects may be quoted
            name, at = _parse_gemma_value(text, at, depth)
            if not text.startswith(":", at):
                raise Unreadable("a key has no value")
            at += 1
        else:
            key = _KEY.match(text, at)
            if key is None:
                raise Unreadable("expected key:value")
            name, at = key[1], key.end()
        entries[name], at = _parse_gemma_value(text, at, depth + 1)
        at = _skip_comma(text, at, "}")
    return entries, at + 1


def _skip_comma(text: str, at: int, close: str) -> int:
    if text.startswith(",", at):
        return at + 1
    if text.startswith(close, at):
        return at
    raise Unreadable(f"expected , or {close}")
