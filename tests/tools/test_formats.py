"""Calls in a model's text, by format."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.tools.formats import Call, detect, parse

ADD = Call("add", {"a": 1})


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("json", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [ADD]),
        ("json", 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n', [ADD]),
        ("json", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ADD]),
        ("json", '<tool_call>{"function": {"name": "add", "arguments": {"a": 1}}}</tool_call>', [ADD]),
        ("json", '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [ADD]),
        ("json", '<think><tool_call>{"name": "no"}</tool_call></think>4', []),
        ("json", '<think>a</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [ADD]),
        ("json", "<think><tool_call>", []),
        ("json", "the answer is {4}", []),
        (
            "xml",
            "<tool_call><function=add><parameter=a>\n1\n</parameter></function></tool_call>",
            [Call("add", {"a": "1"})],
        ),
        ("xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [Call("now", {})]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [ADD]),
        (
            "llama3",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "arguments": {"a": 1}}',
            [ADD, ADD],
        ),
        ("llama3", '{"answer": 4}', []),
        ("llama3", "4", []),
    ],
)  # fmt: skip
def test_calls_are_read(form: str, text: str, calls: list[Call]) -> None:
    assert parse(text, form) == calls  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("json", "<tool_call>add(1)</tool_call>", "no JSON"),
        ("json", '<tool_call>{"name": "add"', "no </tool_call>"),
        ("json", "<tool_call>[1]</tool_call>", "expected a JSON object"),
        ("json", '<tool_call>{"arguments": {}}</tool_call>', "no `name`"),
        ("json", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ("json", '<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "text and no JSON"),
        ("json", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested"),
        ("xml", "<tool_call>add</tool_call>", "expected <function="),
        ("llama3", '{"name": "add", "parameters": {', "no JSON"),
        ("llama3", "<|python_tag|>", "empty"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(form: str, text: str, problem: str) -> None:
    (call,) = parse(text, form)  # type: ignore[arg-type]
    assert problem in call.problem


DEEP, LONG, HALF = "[" * 100_000, "9" * 5_000, '"\\ud800"'


@pytest.mark.parametrize("value", [DEEP, LONG, HALF])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'),
        ("json", '<tool_call>{"name": "add", "arguments": "%s"}</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": %s}}'),
    ],
)
def test_json_that_python_cannot_hold_is_the_models_mistake(form: Any, text: str, value: str) -> None:
    """Brackets without end, a number of 5000 digits, half of a character: answered, and the run goes on."""
    if '"%s"' in text:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    (call,) = parse(text % value, form)
    assert "JSON" in call.problem


def test_two_calls_of_which_one_is_broken_are_two_calls() -> None:
    text = '<tool_call>{"name"<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    first, second = parse(text, "json")
    assert first.problem and second == ADD


TEMPLATES = {
    "json": "{% for m in messages %}{{m.content}}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{c.function.name}}"}</tool_call>{% endfor %}{% endfor %}',
    "xml": "{% for m in messages %}{{m.content}}{% for c in m.tool_calls or [] %}<tool_call><function="
    "{{c.function.name}}></function></tool_call>{% endfor %}{% endfor %}",
    "llama3": "{% for m in messages %}{{m.content}}{% for c in m.tool_calls or [] %}"
    '{"name": "{{c.function.name}}"}{% endfor %}{% endfor %}',
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_format_is_that_of_the_template(form: str) -> None:
    from posttrain.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    assert detect(tokenizer) == "json"
    tokenizer.chat_template = TEMPLATES[form]
    assert detect(tokenizer) == form
    tokenizer.chat_template = "{% for m in messages %}{{m.content}}{% endfor %}"
    assert detect(tokenizer) == "json"
