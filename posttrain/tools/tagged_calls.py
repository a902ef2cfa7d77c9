"""Parsers of the formats whose arguments are text between tags: xml (Qwen3-Coder), glm, and invoke (`<invoke name=`).

An argument may contain the tags of its own format: it ends at a closing tag that is followed by the next argument or
the end of the call, and tags opened within it are counted. An unclosed argument ends where the next one begins.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.tools.call import Call, Unreadable, parse_json
from posttrain.tools.json_calls import Found
from posttrain.tools.literal_calls import parse_literal

_Span = tuple[int, int]
DEPTH = 50  # maximum nesting of tags within an argument


@dataclass(frozen=True)
class Tags:
    """Patterns of a format. call: with the group `name`; parameter: with the group `key`; lines: whether values are on
    lines of their own; wrapped: tag that must follow the end of a call; form: how a call is written."""

    call: str
    parameter: str
    end_value: str
    end_call: str
    form: str
    lines: bool = False
    wrapped: str = ""

    def find_value_end(self, text: str, start: int) -> tuple[int, int]:
        """Return (end of the value that starts at `start`, where parsing continues); (-1, -1) if it has no end."""
        if self.lines and text.startswith("\n", start):  # then the closing tag starts a line, and inline tags are text
            closed, _, _ = self._find_end(text, start, "(?<=\n)")
            if closed:
                return closed
        closed, first, end = self._find_end(text, start, "")
        return closed or first or (end, end)

    def _find_end(self, text: str, start: int, before: str) -> tuple[_Span | None, _Span | None, int]:
        """Find the end of a value: returns (its matching closing tag, or None; a fallback: the next argument or the
        first plausible closing tag; the end of the call). before: lookbehind that a tag must satisfy."""
        follows = re.compile(rf"\s*(?:{self.parameter}|{self.end_call})", re.DOTALL)
        last = rf"{self.end_call}\s*{self.wrapped}\s*(?=\Z|<\||{self.call})"
        marks = re.compile(
            rf"{before}(?:(?P<opens>{_drop_group_names(self.parameter)})|(?P<closes>{self.end_value}))"
            rf"|(?P<ends>{_drop_group_names(last)})|(?P<begins>{_drop_group_names(self.call)})",
            re.DOTALL,
        )
        opened = calls = 0
        next_one: _Span | None = None
        first: _Span | None = None
        for mark in marks.finditer(text, start):
            if max(opened, calls) > DEPTH:
                break
            if mark["opens"]:
                if not opened and next_one is None and text[mark.start() - 1] == "\n":
                    next_one = (mark.start(), mark.start())
                opened += 1
            elif mark["closes"]:
                right = follows.match(text, mark.end()) is not None
                if right and not opened:
                    return mark.span(), None, -1
                first = first or (mark.span() if right else None)
                opened = max(opened - 1, 0)
            elif mark["begins"]:
                calls += 1
            elif calls:
                calls -= 1
            else:
                return None, next_one or first, mark.start()
        return None, next_one or first, -1

    def read(self, match: re.Match[str]) -> Found:
        """Parse the call whose opener was matched."""
        text, at, arguments = match.string, match.end(), {}
        if not match["name"]:
            return self._unreadable_call(text, at, f"expected {self.form}")
        blank, parameter, end_call = (
            re.compile(r"\s*"),
            re.compile(self.parameter, re.DOTALL),
            re.compile(self.end_call),
        )
        while True:
            at = blank.match(text, at).end()  # type: ignore[union-attr]
            if end := end_call.match(text, at):
                break
            found = parameter.match(text, at)
            if found is None:
                return self._unreadable_call(text, at, f"expected {self.form}")
            stop, at = self.find_value_end(text, found.end())
            if stop < 0:
                return self._unreadable_call(text, found.end(), f"the argument `{found['key'][:50]}` has no end")
            value = text[found.end() : stop]
            arguments[found["key"]] = value.removeprefix("\n").removesuffix("\n") if self.lines else value
        at = end.end()
        if self.wrapped and match[0].startswith("<tool_call>"):
            wrapped = re.compile(rf"\s*{self.wrapped}").match(text, at)
            if wrapped is None:
                return [Call(problem=f"the call has no {self.wrapped}")], at
            at = wrapped.end()
        return [Call(match["name"], arguments)], at

    def _unreadable_call(self, text: str, at: int, problem: str) -> Found:
        """Return an unreadable call, and the position after its end or before the next call."""
        close = self.wrapped or self.end_call
        found = re.compile(rf"(?P<close>{close})|(?={_drop_group_names(self.call)}|</think>)").search(text, at)
        if found and found["close"]:
            return [Call(problem=problem)], found.end()
        shown = close.replace("(?:[\\w-]+:)?", "")
        return [Call(problem=f"the call has no {shown}")], found.end() if found else len(text)


def _drop_group_names(pattern: str) -> str:
    """Return the pattern without group names, so that patterns can be combined."""
    return re.sub(r"\?P<\w+>", "?:", pattern)


XML = Tags(
    call=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)\s*>|<tool_call>",
    parameter=r"<parameter=(?P<key>[^>\s]+)\s*>",
    end_value="</parameter>",
    end_call="</function>",
    form="<function=NAME><parameter=KEY>value</parameter></function>",
    lines=True,
    wrapped="</tool_call>",
)
GLM = Tags(
    call=r"<tool_call>(?:\s*(?P<name>[^\s<]+))?",
    parameter=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
    end_value="</arg_value>",
    end_call="</tool_call>",
    form="NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>",
)
INVOKE = Tags(
    call=r"<(?:[\w-]+:)?invoke name=\"(?P<name>[^\"]*)\">",
    parameter=r"<(?:[\w-]+:)?parameter name=\"(?P<key>[^\"]*)\"[^>]*>",
    end_value=r"</(?:[\w-]+:)?parameter>",
    end_call=r"</(?:[\w-]+:)?invoke>",
    form='<parameter name="KEY">value</parameter>',
)


def apply_schema_types(call: Call, properties: Mapping[str, Any]) -> Call:
    """Convert text arguments to the types of the tool's JSON schema: from JSON, from JSON whose quotes are escaped once
    more, or from a Python literal. Texts that do not convert stay text."""
    arguments = {key: _value(value, properties.get(key)) for key, value in call.arguments.items()}
    return Call(call.name, arguments, call.problem)


def _value(value: Any, schema: Mapping[str, Any] | None) -> Any:
    if not isinstance(value, str) or schema is None:
        return value
    kinds = _allowed_types(schema)
    if "null" in kinds and value.strip() in ("null", "None"):
        return None
    if "string" in kinds:
        return value
    for read in (parse_json, lambda text: parse_json(parse_json(f'"{text}"')), parse_literal):  # escaped once more
        with contextlib.suppress(Unreadable, TypeError):
            return read(value)
    return value


def _allowed_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; an empty set allows all."""
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set(kinds or ())
    for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _allowed_types(alternative)
    return types
