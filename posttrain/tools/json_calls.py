"""Parsers of the formats whose arguments are JSON: json, llama3, mistral, deepseek, kimi and harmony.

A parser takes the match of its format's opener and returns the calls there, and the position after them. JSON is parsed
first and closing marks are searched after it, so that an argument may contain any of them.
"""

from __future__ import annotations

import re
from typing import Any

from posttrain.tools.call import Call, Unreadable, make_call, parse_call_object, parse_call_objects, parse_json_at

Found = tuple[list[Call], int]

_BLANK = re.compile(r"\s*")
_FENCE = re.compile(r"\s*```\s*")
_BETWEEN_OBJECTS = re.compile(r"\s*(?:;|,|<\|python_tag\|>)?\s*(?:```)?\s*")


def read_tagged_json(match: re.Match[str]) -> Found:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    text = match.string
    try:
        value, end = parse_json_at(text, match.end())
    except Unreadable as error:
        return _unreadable_call(text, match.end(), f"no JSON: {error}", "</tool_call>", ("<tool_call>", "</think>"))
    at = _skip_whitespace(text, end)
    if text.startswith("</tool_call>", at):
        return [parse_call_object(value)], at + len("</tool_call>")
    return _unreadable_call(text, end, "no JSON: text after it", "</tool_call>", ("<tool_call>", "</think>"))


def read_objects(match: re.Match[str]) -> Found:
    """Parse JSON objects, or a list of them, separated by `;`, `,`, `<|python_tag|>` or whitespace. Text after the
    last one ends the turn."""
    text = match.string
    calls: list[Call] = []
    at = _skip_whitespace(text, match.end())
    while at < len(text) and (not calls or text[at] in "[{"):
        try:
            value, end = parse_json_at(text, at)
        except Unreadable as error:
            return [*calls, Call(problem=f"no JSON: {error}")], len(text)
        calls += parse_call_objects(value)
        at = _BETWEEN_OBJECTS.match(text, end).end()  # type: ignore[union-attr]
    return calls or [Call(problem="the call is empty")], len(text)


def read_mistral(match: re.Match[str]) -> Found:
    """Parse, after `[TOOL_CALLS]`, a list of objects, or `NAME[ARGS]{...}` with an optional `[CALL_ID]ID` before."""
    text, at = match.string, _skip_whitespace(match.string, match.end())
    head = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\s\[{]*\s*)?(?:\[ARGS\])?").match(text, at)
    try:
        value, end = parse_json_at(text, head.end() if head else at)
    except Unreadable as error:
        return _unreadable_call(text, at, f"no JSON: {error}", None, ("[TOOL_CALLS]", "</think>"))
    if head:
        return [make_call(head[1], value)], end
    return parse_call_objects(value), end


def read_deepseek(match: re.Match[str]) -> Found:
    """Parse `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and fenced JSON; V3.1: `NAME<｜tool▁sep｜>{...}`."""
    text, close = match.string, "<｜tool▁call▁end｜>"
    head = re.compile(
        r"\s*(?:function\s*<｜tool▁sep｜>\s*(?P<old>[^\s`{]+)|(?P<new>[^\s<]+)\s*<｜tool▁sep｜>)\s*(?:```(?:json)?)?"
    ).match(text, match.end())
    if head is None:
        return _unreadable_call(text, match.end(), "expected function<｜tool▁sep｜>NAME", close, (match[0], "</think>"))
    try:
        value, end = parse_json_at(text, head.end())
    except Unreadable as error:
        return _unreadable_call(text, head.end(), f"no JSON: {error}", close, (match[0], "</think>"))
    end = fence.end() if (fence := _FENCE.match(text, end)) else _skip_whitespace(text, end)
    if text.startswith(close, end):
        return [make_call(head["old"] or head["new"], value)], end + len(close)
    return _unreadable_call(text, end, "no JSON: text after it", close, (match[0], "</think>"))


def read_kimi(match: re.Match[str]) -> Found:
    """Parse `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""
    text, close = match.string, "<|tool_call_end|>"
    head = re.compile(r"\s*(?:functions\.)?([^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>").match(
        text, match.end()
    )
    if head is None:
        return _unreadable_call(text, match.end(), "expected functions.NAME:0", close, (match[0], "</think>"))
    try:
        value, end = parse_json_at(text, head.end())
    except Unreadable as error:
        return _unreadable_call(text, head.end(), f"no JSON: {error}", close, (match[0], "</think>"))
    end = _skip_whitespace(text, end)
    if text.startswith(close, end):
        return [make_call(head[1], value)], end + len(close)
    return _unreadable_call(text, end, "no JSON: text after it", close, (match[0], "</think>"))


def read_harmony(match: re.Match[str]) -> Found:
    """Parse a message to a tool: `to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>`."""
    text = match.string
    name = match["name"].removeprefix("functions.")
    value: Any
    try:
        value, end = parse_json_at(text, match.end())
    except Unreadable as error:
        return _unreadable_call(text, match.end(), f"no JSON: {error}", "<|call|>", ("<|start|>", "<|end|>"))
    end = _skip_whitespace(text, end)
    if end == len(text) or text.startswith(("<|call|>", "<|end|>", "<|return|>", "<|start|>"), end):
        return [make_call(name, value)], end
    return _unreadable_call(text, end, "no JSON: text after it", "<|call|>", ("<|start|>", "<|end|>"))


def _skip_whitespace(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _unreadable_call(text: str, at: int, problem: str, close: str | None, others: tuple[str, ...]) -> Found:
    """Return an unreadable call, and where parsing resumes: after its closing mark, or before another mark."""
    ends = [found for mark in others if (found := text.find(mark, at)) >= 0]
    stop = min(ends, default=len(text))
    closed = text.find(close, at, stop) if close else -1
    if closed >= 0:
        return [Call(problem=problem)], closed + len(str(close))
    return [Call(problem=problem if close is None else f"the call has no {close}")], stop
