"""Which texts of a conversation a chat template wrote, and where: found by position, not by searching for them.

The conversation is rendered a second time with a probe, a word that occurs nowhere else, in place of each text. A probe
that is missing there stands for a text that the template leaves out. White space and tags around a text stay, since
templates look at them (most split an answer at `</think>`). Beside the first rendering, the probes say where in it each
text stands.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import chat
from posttrain.errors import DataError
from posttrain.images import MARK

Message = Mapping[str, Any]

TOOLS = -1  # in place of a message's number: the row's tools
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names that templates read a turn's thought by
# Keys that steer, and ids that join a result to its call: no text for the model.
_NO_TEXT = frozenset({"role", "train", "weight", "id", "tool_call_id", "type", "index"})

_TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]|/(?:no_?)?think\b)")
_THOUGHT_END = re.compile(r"</(?:\w+:)?(?:think(?:ing)?|thought|reasoning)>|\[/THINK\]")
_PROBE = re.compile(r"x8q\d+x|7301\d{5}(?:\.5)?")


@dataclass(frozen=True)
class Leaf:
    """One text or number of a row. message: its place in the conversation, or TOOLS; field: the key that holds it."""

    probe: str
    value: str | float
    message: int
    field: str
    thought: bool = False


@dataclass(frozen=True)
class Probed:
    """A conversation with a probe in place of each text, and what the probes stand for."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    leaves: list[Leaf]


Spans = dict[Leaf, tuple[int, int]]

MOST_REMEMBERED = 256  # renderings with probes
_marked: dict[tuple[Any, Any, str, bool], str] = {}


def probe(messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Probed:
    """The conversation with a probe in place of each text: contents, thoughts, calls, names and every other key."""
    make = _Maker()
    shown = [{key: make.field(number, m, key) for key in m} for number, m in enumerate(messages)]
    offered = None if tools is None else [make.tool(tool) for tool in tools]
    return Probed(shown, offered, make.leaves)


class _Maker:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []

    def field(self, number: int, message: Message, key: str) -> Any:
        value = message[key]
        if key in _NO_TEXT:
            return value
        if key == "tool_calls" and isinstance(value, list):
            return [self.call(call, number) for call in value]
        if key == "content" and message["role"] == "assistant" and isinstance(value, str):
            ends = [found.end() for found in _THOUGHT_END.finditer(value)]
            return self.text(value, number, key, thought_end=ends[-1] if ends else 0)
        return self.value(value, number, key, thought=key in THOUGHTS)

    def call(self, call: Any, number: int) -> Any:
        if not isinstance(call, Mapping):
            return call
        function = call.get("function")
        inner = function if isinstance(function, Mapping) else call
        shown = {
            key: value if key in _NO_TEXT else self.arguments(value, number) if key == "arguments" else
            self.value(value, number, "tool_calls")
            for key, value in inner.items()
        }  # fmt: skip
        return {**call, "function": shown} if inner is function else shown

    def arguments(self, value: Any, number: int) -> Any:
        if not isinstance(value, str):
            return self.value(value, number, "tool_calls")
        try:
            return json.dumps(self.value(json.loads(value), number, "tool_calls"))
        except ValueError:
            return self.text(value, number, "tool_calls")

    def tool(self, tool: Any) -> Any:
        """Name and description alone: templates read the rest of a schema in ways of their own."""
        if not isinstance(tool, Mapping):
            return tool
        function = tool.get("function")
        inner = function if isinstance(function, Mapping) else tool
        shown = {
            key: self.text(value, TOOLS, "tools")
            if key in ("name", "description") and isinstance(value, str)
            else value
            for key, value in inner.items()
        }
        return {**tool, "function": shown} if inner is function else shown

    def value(self, value: Any, number: int, field: str, *, thought: bool = False) -> Any:
        if isinstance(value, str):
            return self.text(value, number, field, thought_end=len(value) if thought else 0)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | float):
            shown = 730100000 + len(self.leaves) + (0.5 if isinstance(value, float) else 0)
            self.leaves.append(Leaf(repr(shown), value, number, field, thought))
            return shown
        if isinstance(value, Mapping):
            return {key: self.value(inner, number, field, thought=thought) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner, number, field, thought=thought) for inner in value]
        return value

    def text(self, text: str, number: int, field: str, *, thought_end: int = 0) -> str:
        """Each run of the text between tags by a probe, the white space around it left. A text of nothing but tags is
        one run, unless it is an image."""
        parts = _TAG.split(text)
        if text.strip() and MARK not in text and not any(part.strip() for part in parts[::2]):
            parts = [text]
        shown, place = [], 0
        for turn, part in enumerate(parts):
            core = part.strip()
            if turn % 2 or not core:
                shown.append(part)
            else:
                word = f"x8q{len(self.leaves)}x"
                self.leaves.append(Leaf(word, core, number, field, place < thought_end))
                start = part.index(core)
                shown.append(part[:start] + word + part[start + len(core) :])
            place += len(part)
        return "".join(shown)


def mark(tokenizer: Any, probed: Probed, *, generation_prompt: bool = False) -> str:
    """The rendering with probes; "" if the template refuses it, since it allows some texts only.

    Conversations of the same shape have the same probes, so their rendering is remembered.
    """
    shape = json.dumps([probed.messages, probed.tools], default=repr)
    key = (tokenizer, tokenizer.chat_template, shape, generation_prompt)
    if key not in _marked:
        if len(_marked) >= MOST_REMEMBERED:
            _marked.clear()
        try:
            _marked[key] = chat.render(
                tokenizer, probed.messages, tools=probed.tools, generation_prompt=generation_prompt
            )
        except DataError:
            _marked[key] = ""
    return _marked[key]


def place(leaves: Sequence[Leaf], marked: str, real: str) -> Spans | None:
    """Where each text stands in `real`, the rendering, by where its probe stands in `marked`.

    A text that is written twice counts where it is last. None if the two renderings differ in more than the texts: the
    template treats this conversation in another way than its probes.
    """
    by_probe = {leaf.probe: leaf for leaf in leaves}
    found: Spans = {}
    at = last = 0
    pieces: list[tuple[str, Leaf | None]] = []
    for match in _PROBE.finditer(marked):
        if match[0] in by_probe:
            pieces.append((marked[last : match.start()], by_probe[match[0]]))
            last = match.end()
    pieces.append((marked[last:], None))
    for (literal, leaf), following in itertools.zip_longest(pieces, pieces[1:], fillvalue=("", None)):
        if not real.startswith(literal, at):
            return None
        at += len(literal)
        if leaf is None:
            break
        fits = (form for form in _forms(leaf.value) if real.startswith(form + following[0], at))
        form = next(fits, None)
        if form is None:
            return None
        found[leaf] = (at, at + len(form))
        at += len(form)
    return found if at == len(real) else None


def find_missing(leaves: Sequence[Leaf], real: str, spans: Spans | None, start: int = 0) -> list[Leaf]:
    """The texts that are not in real[start:]; without their places, those whose words are not there."""
    if spans is not None:
        return [leaf for leaf in leaves if spans.get(leaf, (-1, 0))[0] < start]
    return [leaf for leaf in leaves if not any(real.find(form, start) >= 0 for form in _forms(leaf.value))]


def _forms(value: str | float) -> Iterator[str]:
    """How a template may write a value: as it is, within JSON, within XML."""
    if not isinstance(value, str):
        yield from dict.fromkeys((json.dumps(value), str(value)))
        return
    yield value
    escaped = (json.dumps(value, ensure_ascii=plain)[1:-1] for plain in (False, True))
    yield from dict.fromkeys((*escaped, html.escape(value), html.escape(value, quote=False)))


# --- the same conversation as different templates read it


def spell(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The messages with the names and forms that the tokenizer's template reads.

    A thought goes by the name that the template knows, or into the content if it knows `</think>` alone. Arguments of
    calls are objects, or JSON text for templates that join texts; a turn of calls alone has the content "", or none for
    templates that ask whether there is one.
    """
    named = [_thought_named(m, str(tokenizer.chat_template)) for m in messages]
    if not any(m.get("tool_calls") for m in named):
        return named
    for form in _spellings(named):
        probed = probe(form, tools)
        marked = mark(tokenizer, probed)
        if all(leaf.probe in marked for leaf in probed.leaves if leaf.field == "tool_calls"):
            return form
    return named


def _thought_named(message: Message, template: str) -> dict[str, Any]:
    own = [name for name in THOUGHTS if name in message]
    if len(own) != 1:
        return dict(message)
    known = [name for name in THOUGHTS if re.search(rf"(?:\.|['\"]){name}\b", template)]
    if own[0] in known:
        return dict(message)
    if known:
        return {known[0] if key == own[0] else key: value for key, value in message.items()}
    thought, content = message[own[0]], message.get("content") or ""
    if "</think>" not in template or not isinstance(thought, str) or "</think>" in content:
        return dict(message)
    rest = {key: value for key, value in message.items() if key != own[0]}
    return {**rest, "content": f"<think>\n{thought.strip()}\n</think>\n\n{content}"}


def _spellings(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    for empty, as_text in (("", False), ("", True), (None, False), (None, True)):
        yield [_normalize_message(m, empty, as_text) if m.get("tool_calls") else dict(m) for m in messages]


def _normalize_message(message: Message, empty: str | None, as_text: bool) -> dict[str, Any]:
    content = message.get("content") or empty
    calls = [_with_text(call) for call in message["tool_calls"]] if as_text else message["tool_calls"]
    return {**message, "content": content, "tool_calls": calls}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_text(function)}
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": text}
