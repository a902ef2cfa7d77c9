"""A tool call written by a chat template is parsed back unchanged, for any arguments and every template of TRL."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import chat
from posttrain.models.tiny import build_tokenizer
from posttrain.tools.call import Call
from posttrain.tools.formats import Format, detect_format, parse_calls, render_call, strip_prompt

trl = pytest.importorskip("trl")
TEMPLATES = {path.stem: path for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}

TEXT = {"type": "string"}
KINDS: dict[str, list[dict[str, Any]]] = {  # the arguments of one call, or of several in one turn
    "a text": [{"text": "Ulm"}],
    "an empty text": [{"text": ""}],
    "no arguments": [{}],
    "numbers": [{"whole": 3, "real": -2.5, "yes": True}],
    "a number as text": [{"text": "007", "whole": 7}],
    "null": [{"maybe": None, "text": "null"}],
    "nested": [{"object": {"a": [1, {"b": "c", "d": [True, None]}], "e": {}}, "list": [[1], ["x", 2.5]]}],
    "unicode": [{"text": "Zürich 東京 🦊 \u2028 ‏"}],
    "quotes": [{"text": 'say "it\'s" `so` \\ \\n'}],
    "lines": [{"text": "\n\n  first\n\tsecond\n"}],
    "tags": [{"text": "<think>x</think> </tool_call> </parameter> <parameter=q> </function> </arg_value> <tool_call>"}],
    "brackets": [{"text": '{"name": "f", "arguments": {}} [TOOL_CALLS] ), g(x=1)] ```'}],
    "a program": [{"text": "def f(x):\n    return {'a': x}  # <b>\n\nprint(f(1))"}],
    "parallel calls": [{"text": "one", "whole": 1}, {"text": "two", "whole": 2}],
}
PROPERTIES = {
    "text": TEXT, "whole": {"type": "integer"}, "real": {"type": "number"}, "yes": {"type": "boolean"},
    "maybe": {"anyOf": [TEXT, {"type": "null"}]}, "object": {"type": "object"}, "list": {"type": "array"},
}  # fmt: skip
SCHEMAS = {"look_up": {"type": "function", "function": {"name": "look_up", "parameters": {"properties": PROPERTIES}}}}

FIRST_ONLY = ("gptoss", "gptoss_training")  # templates that write only the first call of a turn
WITHOUT_CALLS = frozenset(  # templates that write none, with their variants for training; to find them takes seconds
    """
    cohere cohere2 deepseek_r1_distill gemma gemma3 idefics3 lfm2 llama3 llava_next phi3 phi3_5 qwen2_5_vl smolvlm
    """.split()  # noqa: SIM905
)


@functools.cache
def tokenizer(template: str) -> Any:
    made = build_tokenizer()
    made.chat_template = TEMPLATES[template].read_text(encoding="utf-8")
    return made


@functools.cache
def form_of(template: str) -> Format | None:
    """Return the call format; None for a template that writes no calls."""
    return detect_format(tokenizer(template)) if render_call(tokenizer(template)) is not None else None


def render_turn(template: str, arguments: list[dict[str, Any]]) -> str | None:
    """Return the assistant's turn with these calls; None if the template refuses them (several in a turn)."""
    question = {"role": "user", "content": "x"}
    begun = chat.render(tokenizer(template), [question], generation_prompt=True)
    for write in (lambda x: x, json.dumps):
        calls = [
            {"type": "function", "id": f"callid{n:03}", "function": {"name": "look_up", "arguments": write(one)}}
            for n, one in enumerate(arguments)
        ]
        try:
            text = chat.render(
                tokenizer(template), [question, {"role": "assistant", "content": "", "tool_calls": calls}]
            )
        except Exception:
            continue
        return strip_prompt(begun, text)
    return None


WITH_CALLS = [name for name in TEMPLATES if name.removesuffix("_training") not in WITHOUT_CALLS]


def test_most_templates_write_calls() -> None:
    assert {name for name in TEMPLATES if form_of(name) is not None} == set(WITH_CALLS)
    assert len(WITH_CALLS) >= 40 and len({form_of(name) for name in WITH_CALLS}) >= 8


@pytest.mark.parametrize("template", WITH_CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_rendered_call_is_parsed_back(template: str, kind: str) -> None:
    arguments, form = KINDS[kind], form_of(template)
    text = render_turn(template, arguments)
    if text is None:
        assert kind == "parallel calls"  # `only supports single tool-calls at once`
        return
    assert form is not None
    read = parse_calls(without_end(text), form, SCHEMAS)
    written = arguments[:1] if template in FIRST_ONLY else arguments
    assert read == [Call("look_up", one) for one in written], text


def without_end(text: str) -> str:
    """The turn without the token that ends it, which an engine cuts off."""
    for end in ("<|eot_id|>", "<|im_end|>\n", "<|eot|>", "<|observation|>", "<｜end▁of▁sentence｜>"):
        text = text.removesuffix(end)
    return text
