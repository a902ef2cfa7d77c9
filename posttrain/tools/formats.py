"""Tool calls in a model's text: the formats of chat templates, detected from what the template writes.

FORMATS lists them. A call that cannot be read still counts as a call, and is answered with the problem. Text within
`<think>` is not parsed, but a `<think>` within a call is part of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posttrain import chat
from posttrain.errors import ToolError
from posttrain.tools import json_calls, literal_calls, tagged_calls
from posttrain.tools.call import Call
from posttrain.tools.json_calls import Found

Format = Literal[
    "json", "xml", "llama3", "pythonic", "mistral", "harmony", "glm", "deepseek", "kimi", "gemma", "invoke"
]


@dataclass(frozen=True)
class _Form:
    """A call format. opener: regex of the start of a call; read: parser from there on; instruction: for a system
    message; texts: arguments are written as text, and the tool's schema gives their types."""

    opener: str
    read: Callable[[re.Match[str]], Found]
    instruction: str
    texts: bool = False


_TURN_START = r"(?:\A|(?<=</think>))\s*"  # start of the turn, after its thought
FORMATS: dict[Format, _Form] = {
    "json": _Form(
        "<tool_call>",
        json_calls.read_tagged_json,
        '<tool_call>{"name": NAME, "arguments": {KEY: VALUE}}</tool_call>',
    ),
    "xml": _Form(
        tagged_calls.XML.call,
        tagged_calls.XML.read,
        "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
        texts=True,
    ),
    "llama3": _Form(
        rf"<\|python_tag\|>|{_TURN_START}(?:```(?:json)?\s*)?(?=\[?\s*\{{\s*\"(?:name|type|function)\"\s*:)",
        json_calls.read_objects,
        '{"name": NAME, "parameters": {KEY: VALUE}}',
    ),
    "pythonic": _Form(
        rf"<\|tool_call_start\|>|<\|python_start\|>|{_TURN_START}(?=\[\s*[A-Za-z_][\w.]*\()",
        literal_calls.read_pythonic,
        "[NAME(KEY=VALUE)]",
    ),
    "mistral": _Form(
        r"\[TOOL_CALLS\]", json_calls.read_mistral, '[TOOL_CALLS][{"name": NAME, "arguments": {KEY: VALUE}}]'
    ),
    "harmony": _Form(
        r"\bto=(?P<name>[\w.\-]+)(?:(?!<\|(?:message|start|end|call|return)\|>).){0,200}<\|message\|>",
        json_calls.read_harmony,
        "<|channel|>commentary to=functions.NAME<|message|>{KEY: VALUE}<|call|>",
    ),
    "glm": _Form(
        tagged_calls.GLM.call,
        tagged_calls.GLM.read,
        "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
        texts=True,
    ),
    "deepseek": _Form(
        "<｜tool▁call▁begin｜>",
        json_calls.read_deepseek,
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{KEY: VALUE}<｜tool▁call▁end｜>",
    ),
    "kimi": _Form(
        r"<\|tool_call_begin\|>",
        json_calls.read_kimi,
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{KEY: VALUE}<|tool_call_end|>",
    ),
    "gemma": _Form(
        r"<\|tool_call>\s*call:(?P<name>[^\s{]+)\{",
        literal_calls.read_gemma,
        "<|tool_call>call:NAME{KEY:VALUE}<tool_call|>",
    ),
    "invoke": _Form(
        tagged_calls.INVOKE.call,
        tagged_calls.INVOKE.read,
        '<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>',
        texts=True,
    ),
}


def parse_calls(text: str, form: Format, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> list[Call]:
    """Parse the calls of a model's turn, in order.

    schemas: tool name -> its JSON schema (`{"type": "function", ...}`), which gives the types of arguments in formats
    that write them as text; without a schema they stay text.
    """
    one, calls, at = FORMATS[form], list[Call](), 0
    marks = re.compile(rf"(?P<thinks><think>)|(?P<thought></think>)|(?:{one.opener})", re.DOTALL)
    while found := marks.search(text, at):
        if found["thinks"]:
            closed = text.find("</think>", found.end())
            if closed < 0:
                break
            at = closed + len("</think>")
        elif found["thought"]:  # end of a thought that the prompt opened
            calls, at = [], found.end()
        else:
            new, at = one.read(found)
            calls += new
    return [_with_types(call, schemas) for call in calls] if one.texts and schemas else calls


def _with_types(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    schema = schemas.get(call.name)
    return (
        call
        if schema is None
        else tagged_calls.apply_schema_types(call, schema["function"]["parameters"]["properties"])
    )


_ARGUMENTS = {"x8key": "x8value", "x8count": 3}
_PROPERTIES = {"x8key": {"type": "string"}, "x8count": {"type": "integer"}}
_SCHEMA = {"x8name": {"function": {"parameters": {"properties": _PROPERTIES}}}}
_LAST_MARK = re.compile(r"(?:<\|[^<>]*\|>|<[^<>\s]*>|\[/?[A-Z_]+\])\s*\Z")
_MAX_MARKS = 4  # maximum special tokens after a call: the end of its turn, and what some templates open next


def detect_format(tokenizer: Any) -> Format:
    """Detect the format in which the template writes a call; json if it writes none, which the prompt then explains.

    Renders a call and parses it back. Raises ToolError for a template whose format cannot be parsed, because its calls
    would pass as plain text.
    """
    text = render_call(tokenizer)
    if text is None:
        return "json"
    cuts = [text]
    for _ in range(_MAX_MARKS):
        cuts.append(_LAST_MARK.sub("", cuts[-1]).rstrip())
    for right in (_is_right, _is_named):  # the second is for templates that leave arguments out
        for cut in cuts:
            for form in FORMATS:
                if right(parse_calls(cut, form, _SCHEMA)):
                    return form
    raise ToolError(
        f"the chat template writes tool calls in a form that cannot be read: {text.strip()!r:.300}",
        allowed=f"forms: {', '.join(FORMATS)}",
        hint="if the model writes one of these, say which: `tool_format: json`",
    )


def _is_right(calls: list[Call]) -> bool:
    return calls == [Call("x8name", _ARGUMENTS)]


def _is_named(calls: list[Call]) -> bool:
    return [(call.name, call.problem) for call in calls] == [("x8name", "")]


def render_call(tokenizer: Any) -> str | None:
    """Return an assistant turn with one call, as the template renders it; None if the render lacks the call."""
    if not tokenizer.chat_template:
        return None
    question = {"role": "user", "content": "x"}
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        call = {"type": "function", "id": "x8call001", "function": {"name": "x8name", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = chat.render(tokenizer, [question, turn])
            begun = chat.render(tokenizer, [question], generation_prompt=True)
        except Exception:  # this template wants arguments as the other type, or does not support calls
            continue
        if "x8name" in text:
            return strip_prompt(begun, text)
    return None


def strip_prompt(begun: str, text: str) -> str:
    """Return a rendered turn without its common beginning with `begun`. If `begun` continues differently (it opens a
    thought, and this turn has none), cut after the last tag or line break that both share, because `<think>` and
    `<tool_call>` share `<t`."""
    same = next((n for n, (a, b) in enumerate(zip(text, begun, strict=False)) if a != b), min(len(text), len(begun)))
    if same < len(begun):
        same = max(text.rfind(">", 0, same), text.rfind("\n", 0, same)) + 1
    return text[same:]


def template_knows_tools(tokenizer: Any, tools: list[dict[str, Any]]) -> bool:
    """Return whether the template includes tool descriptions in the prompt."""
    messages = [{"role": "user", "content": "x"}]
    return chat.render(tokenizer, messages, tools=tools) != chat.render(tokenizer, messages)


def explain_tools(tools: list[dict[str, Any]], form: Format) -> str:
    """Return a system message that describes the tools, for templates that do not."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f"You can call tools:\n{listed}\nTo call one, write {FORMATS[form].instruction}"
