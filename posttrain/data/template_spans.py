"""Positions of a conversation's texts in a chat template's output, found with probes instead of text search.

The conversation is rendered a second time with a probe, a word that occurs nowhere else, in place of each text. A
missing probe marks a text that the template omits. White space and tags around a text stay, since templates depend on
them (most split an answer at `</think>`). Aligning both renderings gives the span of each text in the real one.
"""

from __future__ import annotations

import functools
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
from posttrain.thoughts import (
    KNOWN_FORMATS,
    STANDARD,
    THINK_END,
    THINK_START,
    ThoughtFormat,
    is_declared,
    written_format,
)

Message = Mapping[str, Any]

TOOLS = -1  # message index of the row's tools
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys from which templates read a turn's thought
# Control keys, and ids that link a result to its call: not text for the model.
_CONTROL_KEYS = frozenset({"role", "train", "weight", "id", "tool_call_id", "type", "index"})

_TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]|/(?:no_?)?think\b)")
_PROBE = re.compile(r"x8q\d+x|7301\d{5}(?:\.5)?")


@functools.lru_cache(maxsize=4)
def _thought_ends(formats: tuple[ThoughtFormat, ...]) -> re.Pattern[str]:
    """Return a regex of the marks that end a thought."""
    closings = (re.escape(form.closing) for form in formats)
    return re.compile("|".join((r"</(?:\w+:)?(?:think(?:ing)?|thought|reasoning)>", *closings)))


@dataclass(frozen=True)
class Leaf:
    """One text or number of a row. message: its index in the conversation, or TOOLS; field: the key that holds it."""

    probe: str
    value: str | float
    message: int
    field: str
    thought: bool = False


@dataclass(frozen=True)
class Probed:
    """A conversation with a probe in place of each text, and the text that each probe stands for."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    leaves: list[Leaf]


Spans = dict[Leaf, tuple[int, int]]

MAX_CACHED = 256  # cached renderings with probes
_rendered: dict[tuple[Any, Any, str, bool], str] = {}


def insert_probes(messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Probed:
    """Return the conversation with a probe in place of each text, in all fields except control keys."""
    inserter = _ProbeInserter()
    probed_messages = [{key: inserter.field(number, m, key) for key in m} for number, m in enumerate(messages)]
    probed_tools = None if tools is None else [inserter.tool(tool) for tool in tools]
    return Probed(probed_messages, probed_tools, inserter.leaves)


class _ProbeInserter:
    """Replaces the texts of messages and tools by probes and collects them in `leaves`."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []

    def field(self, number: int, message: Message, key: str) -> Any:
        """Return one field of a message with probes."""
        value = message[key]
        if key in _CONTROL_KEYS:
            return value
        if key == "tool_calls" and isinstance(value, list):
            return [self.call(call, number) for call in value]
        if key == "content" and message["role"] == "assistant" and isinstance(value, str):
            ends = [match.end() for match in _thought_ends(tuple(KNOWN_FORMATS)).finditer(value)]
            return self.text(value, number, key, thought_end=ends[-1] if ends else 0)
        return self.value(value, number, key, thought=key in THOUGHTS)

    def call(self, call: Any, number: int) -> Any:
        """Return a tool call with probes in its name, arguments and other fields."""
        if not isinstance(call, Mapping):
            return call
        function = call.get("function")
        inner = function if isinstance(function, Mapping) else call
        shown = {
            key: value if key in _CONTROL_KEYS else self.arguments(value, number) if key == "arguments" else
            self.value(value, number, "tool_calls")
            for key, value in inner.items()
        }  # fmt: skip
        return {**call, "function": shown} if inner is function else shown

    def arguments(self, value: Any, number: int) -> Any:
        """Return the arguments of a call with probes; JSON text stays JSON text."""
        if not isinstance(value, str):
            return self.value(value, number, "tool_calls")
        try:
            return json.dumps(self.value(json.loads(value), number, "tool_calls"))
        except ValueError:
            return self.text(value, number, "tool_calls")

    def tool(self, tool: Any) -> Any:
        """Return a tool schema with probes in name and description only: other fields are rendered variously."""
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
        """Return any value with a probe for each text and number in it."""
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
        """Return the text with a probe for each run between tags, surrounding white space kept.

        A text that consists only of tags is one run, unless it is an image.
        """
        parts = _TAG.split(text)
        if text.strip() and MARK not in text and not any(part.strip() for part in parts[::2]):
            parts = [text]
        shown, offset = [], 0
        for index, part in enumerate(parts):
            core = part.strip()
            if index % 2 or not core:  # odd parts are tags
                shown.append(part)
            else:
                word = f"x8q{len(self.leaves)}x"
                self.leaves.append(Leaf(word, core, number, field, offset < thought_end))
                start = part.index(core)
                shown.append(part[:start] + word + part[start + len(core) :])
            offset += len(part)
        return "".join(shown)


def render_probes(tokenizer: Any, probed: Probed, *, generation_prompt: bool = False) -> str:
    """Return the rendering with probes; "" if the template rejects it, because it allows only certain texts.

    Conversations of the same shape have the same probes, so renderings are cached by shape.
    """
    shape = json.dumps([probed.messages, probed.tools], default=repr)
    key = (tokenizer, tokenizer.chat_template, shape, generation_prompt)
    if key not in _rendered:
        if len(_rendered) >= MAX_CACHED:
            _rendered.clear()
        try:
            _rendered[key] = chat.render(
                tokenizer, probed.messages, tools=probed.tools, generation_prompt=generation_prompt
            )
        except DataError:
            _rendered[key] = ""
    return _rendered[key]


def locate_spans(leaves: Sequence[Leaf], marked: str, real: str) -> Spans | None:
    """Return the span of each text in `real`, the real rendering, aligned with `marked`, the rendering with probes.

    A text that is written twice gets its last span. None if the renderings differ in more than the texts, i.e. the
    template treats the probes differently from the texts.
    """
    by_probe = {leaf.probe: leaf for leaf in leaves}
    spans: Spans = {}
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
        fits = (form for form in _written_forms(leaf.value) if real.startswith(form + following[0], at))
        form = next(fits, None)
        if form is None:
            return None
        spans[leaf] = (at, at + len(form))
        at += len(form)
    return spans if at == len(real) else None


def find_missing(leaves: Sequence[Leaf], real: str, spans: Spans | None, start: int = 0) -> list[Leaf]:
    """Return the texts that are not in real[start:]; without spans, the texts that do not occur there literally."""
    if spans is not None:
        return [leaf for leaf in leaves if spans.get(leaf, (-1, 0))[0] < start]
    return [leaf for leaf in leaves if not any(real.find(form, start) >= 0 for form in _written_forms(leaf.value))]


def _written_forms(value: str | float) -> Iterator[str]:
    """Yield the forms in which a template may write a value: literally, escaped for JSON, or escaped for XML."""
    if not isinstance(value, str):
        yield from dict.fromkeys((json.dumps(value), str(value)))
        return
    yield value
    escaped = (json.dumps(value, ensure_ascii=plain)[1:-1] for plain in (False, True))
    yield from dict.fromkeys((*escaped, html.escape(value), html.escape(value, quote=False)))


# --- message formats of different templates


def adapt_messages(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the messages with the keys and formats that the tokenizer's template reads.

    A thought is stored under the key that the template reads, or in the content if the template keeps its marks there.
    Call arguments are objects, or JSON text for templates that concatenate them; a turn that consists of calls has the
    content "", or None for templates that test for a content.
    """
    named = [_place_thought(m, tokenizer) for m in messages]
    if not any(m.get("tool_calls") for m in named):
        return named
    for form in _message_variants(named):
        probed = insert_probes(form, tools)
        marked = render_probes(tokenizer, probed)
        if all(leaf.probe in marked for leaf in probed.leaves if leaf.field == "tool_calls"):
            return form
    return named


def _place_thought(message: Message, tokenizer: Any) -> dict[str, Any]:
    """Return the message with its thought under the key that the template reads, else in the content.

    `<think>...</think>` in the content is such a thought too if the model marks its thoughts in another way.
    """
    template, form, given = str(tokenizer.chat_template), written_format(tokenizer), message
    own = [name for name in THOUGHTS if name in message]
    if not own and form is not STANDARD and message["role"] == "assistant":
        begin, opened, text = str(message.get("content")).partition(THINK_START)
        thought, closed, answer = text.partition(THINK_END)
        tagged = opened and closed and not begin.strip()
        if tagged and not (message.get("tool_calls") and answer.strip()):  # gpt-oss: no text beside a call
            message = {**message, "content": answer.lstrip(), THOUGHTS[0]: thought.strip()}
            own = [THOUGHTS[0]]
    if len(own) != 1:
        return dict(message)
    known = [name for name in THOUGHTS if re.search(rf"(?:\.|['\"]){name}\b", template)]
    mark = form.closing if is_declared(tokenizer) else ""  # a template may write a thought without the model's marks
    if mark or form is not STANDARD:  # Magistral's template reads `thinking` of a content's parts, not of a message
        known = [name for name in known if _writes_thought(tokenizer, template, name, _THOUGHT, mark)]
    if own[0] in known:
        return dict(message)
    if known:
        return {known[0] if key == own[0] else key: value for key, value in message.items()}
    thought, content = message[own[0]], message.get("content") or ""
    unknown = form is STANDARD and not mark and THINK_END not in template
    if unknown or not isinstance(thought, str) or not isinstance(content, str) or form.closing in content:
        return dict(given)
    others = {key: value for key, value in message.items() if key != own[0]}
    if form is STANDARD:
        return {**others, "content": f"<think>\n{thought.strip()}\n</think>\n\n{content}"}
    if not _writes_thought(tokenizer, template, "content", f"{form.opening}{_THOUGHT}{form.closing}x8answer", mark):
        return dict(given)
    return {**others, "content": f"{form.opening}{thought.strip()}{form.closing}{content}"}


_THOUGHT = "x8thought"


@functools.lru_cache(maxsize=16)
def _writes_thought(tokenizer: Any, template: str, key: str, value: str, mark: str) -> bool:
    """Return whether the template writes the thought in this value of an assistant message, and `mark`. template: a
    cache key."""
    del template
    turn = {"role": "assistant", "content": "x8answer", key: value}
    try:
        written = chat.render(tokenizer, [{"role": "user", "content": "x8question"}, turn])
        return _THOUGHT in written and mark in written
    except DataError:
        return False


def _message_variants(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages with empty content as "" or None, and arguments as objects or JSON text."""
    for empty, as_text in (("", False), ("", True), (None, False), (None, True)):
        yield [_normalize_message(m, empty, as_text) if m.get("tool_calls") else dict(m) for m in messages]


def _normalize_message(message: Message, empty: str | None, as_text: bool) -> dict[str, Any]:
    """Return a message with calls in one of these variants."""
    content = message.get("content") or empty
    calls = [_with_json_arguments(call) for call in message["tool_calls"]] if as_text else message["tool_calls"]
    return {**message, "content": content, "tool_calls": calls}


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_json_arguments(function)}
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": text}
