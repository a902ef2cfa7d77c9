"""Parsing of tool calls in a model's text, by format."""

from __future__ import annotations

import time
from typing import Any

import pytest

from posttrain.errors import ToolError
from posttrain.tools.call import Call
from posttrain.tools.formats import FORMATS, Format, detect_format, parse_calls

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
def test_calls_are_parsed(form: str, text: str, calls: list[Call]) -> None:
    assert parse_calls(text, form) == calls  # type: ignore[arg-type]


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
def test_unreadable_call_reports_the_reason(form: str, text: str, problem: str) -> None:
    (call,) = parse_calls(text, form)  # type: ignore[arg-type]
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
def test_json_beyond_python_limits_is_a_model_error(form: Any, text: str, value: str) -> None:
    """Endless brackets, a number of 5000 digits, half a surrogate pair: answered with an error, and the run
    continues.
    """
    if '"%s"' in text:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    (call,) = parse_calls(text % value, form)
    assert "JSON" in call.problem


def test_broken_call_next_to_a_valid_one_counts_as_a_call() -> None:
    text = '<tool_call>{"name"<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    first, second = parse_calls(text, "json")
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
def test_format_is_detected_from_the_template(form: str) -> None:
    from posttrain.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    assert detect_format(tokenizer) == "json"
    tokenizer.chat_template = TEMPLATES[form]
    assert detect_format(tokenizer) == form
    tokenizer.chat_template = "{% for m in messages %}{{m.content}}{% endfor %}"
    assert detect_format(tokenizer) == "json"


NESTED = Call("add", {"a": {"b": [1, "</tool_call>"]}})
FORMS: list[tuple[Format, str, list[Call]]] = [
    # old and new Mistral, with and without ids
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x12345678"}]', [ADD]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
     [ADD, Call("now")]),
    ("mistral", 'So.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', [ADD, Call("now")]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]x12345678[ARGS]{"a": 1}', [ADD]),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', [ADD]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]no[ARGS]{}"}', [Call("add", {"a": "[TOOL_CALLS]no[ARGS]{}"})]),
    # the messages of gpt-oss, with the recipient before or behind the channel
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', [ADD]),
    ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', [ADD]),
    ("harmony", "<|channel|>analysis<|message|>I write to=functions.add<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', [ADD]),
    ("harmony", "<|channel|>final<|message|>4", []),
    ("harmony", "<|channel|>analysis<|message|>to=functions.add<|end|><|start|>assistant<|channel|>final<|message|>{}",
     []),
    # DeepSeek V3 and R1, V3.1
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": 1}\n```"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [ADD]),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [ADD, Call("now")]),
    ("deepseek", '<think>x</think>so<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "```"}<｜tool▁call▁end｜>',
     [Call("add", {"a": "```"})]),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
     '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
     "<|tool_calls_section_end|>", [ADD, Call("now")]),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [Call("add", {"a": "1"})]),
    ("glm", "<think>so</think><tool_call>now\n</tool_call>", [Call("now")]),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value></tool_call></arg_value></tool_call>",
     [Call("add", {"a": "</tool_call>"})]),
    ("pythonic", "[add(a=1), now()]", [ADD, Call("now")]),
    ("pythonic", "<|python_start|>[add(a=1)]<|python_end|>", [ADD]),
    ("pythonic", "<|tool_call_start|>[add(a='<|tool_call_end|>', b=[True, none, -1.5])]<|tool_call_end|>",
     [Call("add", {"a": "<|tool_call_end|>", "b": [True, None, -1.5]})]),
    ("pythonic", "[1, 2]", []),
    ("pythonic", "the list [add(a=1)]", []),
    ("gemma", '<|tool_call>call:add{a:1,b:<|"|>x}<tool_call|><|"|>,c:[true,null,{d:<|"|><|"|>}]}<tool_call|>',
     [Call("add", {"a": 1, "b": "x}<tool_call|>", "c": [True, None, {"d": ""}]})]),
    ("invoke", '<function_calls><invoke name="add"><parameter name="a">1</parameter></invoke></function_calls>',
     [Call("add", {"a": "1"})]),
    ("llama3", '[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]', [ADD, Call("now")]),
    ("llama3", '```json\n{"name": "add", "parameters": {"a": 1}}\n```', [ADD]),
    ("llama3", '<think>so</think>\n{"name": "add", "parameters": {"a": 1}}', [ADD]),
    ("llama3", '{"name": "add", "parameters": {"a": "</think>{"}}', [Call("add", {"a": "</think>{"})]),
    # cases of SGLang's detectors: text behind a call, the tag before each call, the JSON that LFM2 can be asked for
    ("llama3", '{"name": "add", "parameters": {"a": 1}} Some follow-up text', [ADD]),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|python_tag|>{"name": "now", "parameters": {}}',
     [ADD, Call("now")]),
    ("pythonic", '<|tool_call_start|>{"name": "add", "arguments": {"a": 1}}<|tool_call_end|>', [ADD]),
    ("pythonic", 'So.<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "parameters": {}}]'
     "<|tool_call_end|>", [ADD, Call("now")]),
    # JSON before tags
    ("json", '<tool_call>{"name": "add", "arguments": {"a": {"b": [1, "</tool_call>"]}}}</tool_call>', [NESTED]),
    ("json", '<tool_call>{"name": "add", "arguments": {"a": "<think>x</think>"}}</tool_call>',
     [Call("add", {"a": "<think>x</think>"})]),
    ("json", '<tool_call>{"name": "add", "arguments": {"a": "<think>"}}</tool_call> so',
     [Call("add", {"a": "<think>"})]),
    ("json", '<tool_call>{"name": "add", "arguments": {"a": "</think>"}}</tool_call>',
     [Call("add", {"a": "</think>"})]),
    ("json", '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}</tool_call>',
     [Call("add", {"a": "<tool_call>"})]),
    ("json", 'I take <tool_call>{"name": "no", "arguments": {}}</tool_call></think><tool_call>{"name": "add", '
     '"arguments": {"a": 1}}</tool_call>', [ADD]),
    ("json", 'I write <tool_call> then</think>4', []),
    # texts between tags
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
     [Call("add", {"a": "1", "b": "2"})]),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", [Call("add", {"a": "1"})]),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n<parameter=x>1</parameter>\n</parameter>\n<parameter=b>\n2\n"
     "</parameter>\n</function>\n</tool_call>", [Call("add", {"a": "<parameter=x>1</parameter>", "b": "2"})]),
    ("xml", "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>",
     [Call("add", {"a": "1", "b": "2"})]),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n</parameter> and </tool_call>\n</parameter>\n</function>\n"
     "</tool_call>",
     [Call("add", {"a": "</parameter> and </tool_call>"})]),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n<tool_call>\n<function=no>\n<parameter=x>\n1\n</parameter>\n"
     "</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
     [Call("add", {"a": "<tool_call>\n<function=no>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"})]),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n<think>x</think>\n</parameter>\n</function>\n</tool_call>",
     [Call("add", {"a": "<think>x</think>"})]),
    ("xml", "<tool_call>\n<function=a>\n<parameter=x>\n1\n</function>\n</tool_call>\n<tool_call>\n<function=b>\n"
     "<parameter=y>\n2\n</parameter>\n</function>\n</tool_call>", [Call("a", {"x": "1"}), Call("b", {"y": "2"})]),
    ("xml", "<function=add><parameter=a>1</parameter></function>", [Call("add", {"a": "1"})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "calls"), FORMS)
def test_each_format_is_parsed(form: Format, text: str, calls: list[Call]) -> None:
    assert parse_calls(text, form) == calls


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("mistral", "[TOOL_CALLS]add(1)", "no JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "add"', "no JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]", "must be an object"),
        ("harmony", " to=functions.add<|channel|>commentary<|message|>a = 1<|call|>", "no JSON"),
        ("harmony", ' to=functions.add<|message|>{"a": 1} so<|call|>', "text after it"),
        ("deepseek", "<｜tool▁call▁begin｜>add(1)<｜tool▁call▁end｜>", "expected function"),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}', "has no <｜tool▁call▁end｜>"),
        ("kimi", "<|tool_call_begin|>add<|tool_call_end|>", "expected functions.NAME"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{<|tool_call_end|>", "no JSON"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "expected NAME"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1", "has no"),
        ("pythonic", "[add(1)]", "need names"),
        ("pythonic", "[add(a=1]", "expected"),
        ("pythonic", "[add(a=x)]", "no value"),
        ("pythonic", "[add(a=1)] then", "text after"),
        ("pythonic", "<|tool_call_start|>[add(a=1)]", "has no <|tool_call_end|>"),
        ("pythonic", '<|tool_call_start|>{"name": "add"<|tool_call_end|>', "no JSON"),
        ("pythonic", "[add(a=" + "[" * 5000 + "]" * 5000 + ")]", "expected"),
        ("gemma", "<|tool_call>call:add{a}<tool_call|>", "expected key:value"),
        ("gemma", "<|tool_call>call:add{a:x}<tool_call|>", "no text, number"),
        ("gemma", "<|tool_call>call:add{a:" + "[" * 5000 + "}<tool_call|>", "nested"),
        ("invoke", '<invoke name="add">1</invoke>', "expected"),
        ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "no </tool_call>"),
        ("xml", "<tool_call>\n<function=add>\n1\n</function>\n</tool_call>", "expected <function="),
        ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1", "no </tool_call>"),
        ("json", '<tool_call>{"name": "add", "arguments": {"a": 1}} so</tool_call>', "text after it"),
        ("json", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "infinite"),
        ("json", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "infinite"),
    ],
)
def test_unreadable_call_of_each_format_reports_the_reason(form: Format, text: str, problem: str) -> None:
    (call,) = parse_calls(text, form)
    assert problem in call.problem


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call><function=f><parameter=a>\n", "<think>", "</parameter>",
    "[TOOL_CALLS]f", "<tool_call>f<arg_key>a</arg_key><arg_value>", "to=f<|message|>", "<|tool_call>call:f{a:[",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "[f(", "{\"name\":"])  # fmt: skip
def test_hostile_turns_are_parsed_quickly(form: Format, piece: str) -> None:
    started = time.monotonic()
    parse_calls(piece * 2000, form)
    assert time.monotonic() - started < 5


def test_text_arguments_are_converted_by_the_schema() -> None:
    properties = {
        "n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": "boolean"}, "l": {"type": "array"},
        "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }  # fmt: skip
    schemas = {"f": {"function": {"parameters": {"properties": properties}}}}
    values = {"n": "3", "s": "3", "b": "True", "l": '[1, "x"]', "m": "None", "other": "4"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = parse_calls(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>", "xml", schemas)
    assert call.arguments == {"n": 3, "s": "3", "b": True, "l": [1, "x"], "m": None, "other": "4"}
    (wrong,) = parse_calls("<function=f><parameter=n>three</parameter></function>", "xml", schemas)
    assert wrong.arguments == {"n": "three"}


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ("array", r"[{\"id\": 1, \"path\": \"C:\\\\x\"}]", [{"id": 1, "path": "C:\\x"}]),  # SGLang's cases for GLM-4.5
        ("object", "{'unit': None, 'days': (1, 2)}", {"unit": None, "days": [1, 2]}),
        ("array", "['a', True]", ["a", True]),
        ("array", "[1, 2", "[1, 2"),
        ("object", "__import__('os')", "__import__('os')"),
        ("integer", "3x", "3x"),
        ("string", "['a']", "['a']"),
    ],
)
def test_values_written_as_escaped_json_or_python_literals(kind: str, written: str, value: Any) -> None:
    schemas = {"f": {"function": {"parameters": {"properties": {"a": {"type": kind}}}}}}
    (call,) = parse_calls(
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{written}</arg_value></tool_call>", "glm", schemas
    )
    assert call.arguments == {"a": value}


_CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
_END = "{% endfor %}{% endfor %}"
MORE_TEMPLATES = {
    "mistral": '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}]</s>',
    "mistral, new": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}</s>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
    "<|im_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "llama3": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}<|eot_id|>',
    "pythonic": "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})]<|eot|>",
}  # fmt: skip


@pytest.mark.parametrize("name", MORE_TEMPLATES)
def test_format_of_other_templates_is_detected(name: str) -> None:
    from posttrain.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = _CALLS + MORE_TEMPLATES[name] + _END
    assert detect_format(tokenizer) == name.partition(",")[0]


@pytest.mark.parametrize(
    "written", ["CALL {{ c.function.name }} WITH {{ c.function.arguments }}", "<<{{ c | tojson }}>>"]
)
def test_template_with_an_unknown_call_format_is_an_error(written: str) -> None:
    from posttrain.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = _CALLS + written + _END
    with pytest.raises(ToolError, match="cannot be read"):
        detect_format(tokenizer)


def test_thought_opened_by_the_prompt_hides_no_call_tag() -> None:
    """`<think>` in the prompt and `<tool_call>` in the turn share their first characters."""
    from posttrain.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    for name, call in {
        "json": '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "</tool_call>",
        "deepseek": MORE_TEMPLATES["deepseek"],
    }.items():
        tokenizer.chat_template = _CALLS + call + _END + "{% if add_generation_prompt %}<think>{% endif %}"
        assert detect_format(tokenizer) == name
