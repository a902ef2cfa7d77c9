"""Messages in the formats of other trainers' files."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.data.messages import parse_messages
from posttrain.data.row_formats import normalize_row
from posttrain.errors import DataError

TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def read(*found: Any, trained: bool = True) -> list[dict[str, Any]]:
    return parse_messages(list(found), "messages", "here", trained=trained)


def test_sharegpt_column_is_the_messages_or_the_prompt_of_a_pair() -> None:
    row = normalize_row({"conversations": TURNS, "id": 3}, "here")
    assert row == {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "id": 3,
    }
    pair = {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "b"}}
    found = normalize_row(pair, "here")
    assert (found["prompt"], found["chosen"], found["rejected"]) == ([{"role": "user", "content": "q"}], "a", "b")
    beside = normalize_row({"prompt": "p", "conversations": TURNS}, "here")
    assert "messages" not in beside  # a row that has a prompt keeps it


@pytest.mark.parametrize("sender", ["gpt", "chatgpt", "ai", "bot", "model", "assistant"])
@pytest.mark.parametrize("role", ["from", "role"])
@pytest.mark.parametrize("content", ["value", "content"])
def test_names_of_sharegpt_under_either_key(role: str, sender: str, content: str) -> None:
    """As in datasets of axolotl and ms-swift that mix `role: human` or `from` with OpenAI's keys."""
    found = read({role: "human", content: "q"}, {role: sender, content: "a", "train": False})
    assert found == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}]


def test_calls_and_results_of_ms_swift() -> None:
    found = read({"role": "tool_call", "content": '{"name": "f"}'}, {"role": "tool_response", "content": "3"})
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert found == [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    glm = {"role": "observation", "content": "3"}  # a role of GLM's own templates
    assert read(glm) == [glm]


def test_sharegpt_calls_are_assistant_turns_and_observations_tool_turns() -> None:
    call = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    found = read({"from": "function_call", "value": call}, {"from": "observation", "value": "sun"})
    assert found == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}],
        },
        {"role": "tool", "content": "sun"},
    ]
    assert len(read({"from": "function_call", "value": f"[{call}, {call}]"})[0]["tool_calls"]) == 2
    thought = read({"from": "function_call", "value": f"<think>\nin Ulm\n</think>\n\n{call}"})  # LLaMA-Factory
    assert thought == [{**found[0], "content": "<think>\nin Ulm\n</think>"}]
    for value in ("weather(Ulm)", "[]", '{"arguments": {}}', f"<think>{call}"):
        with pytest.raises(DataError, match=r"here  `messages\[0\].value` is no call"):
            read({"from": "function_call", "value": value})


def test_content_parts_are_joined_as_text_and_images_refused() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "one two"}]
    with pytest.raises(DataError, match=r"has a part that is no text: .*image_url"):
        read({"role": "user", "content": [*parts, {"type": "image_url", "image_url": "x"}]})
    with pytest.raises(DataError, match=r"`messages\[0\].content` is int \(3\), not text"):
        read({"role": "user", "content": 3})


def test_message_weight_selects_trained_turns_and_fractions_are_refused() -> None:
    marked = [read({"role": "assistant", "content": "a", "weight": w})[0] for w in (0, 1)]
    assert [m["train"] for m in marked] == [False, True]
    assert "weight" not in marked[0]
    with pytest.raises(DataError, match=r"`messages\[0\].weight` is 0.5"):
        read({"role": "assistant", "content": "a", "weight": 0.5})
    with pytest.raises(DataError, match=r"`messages\[0\].train` is str \(false\)"):
        read({"role": "assistant", "content": "a", "train": "false"})


def test_flags_of_content_parts_are_those_of_the_message_or_refused() -> None:
    """axolotl's `train` or `weight` in parts of a content."""

    def parts(*flags: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": "a", **flag} for flag in flags]}

    assert read(parts({"train": False}, {"weight": 0})) == [{"role": "assistant", "content": "aa", "train": False}]
    assert read(parts({"train": True}, {"train": None})) == [{"role": "assistant", "content": "aa"}]
    for flags in (({"train": False}, {"train": True}), ({"weight": 0}, {})):
        with pytest.raises(DataError, match=r"`messages\[0\].content` has parts that are trained on and parts that"):
            read(parts(*flags))
        assert read(parts(*flags), trained=False) == [{"role": "assistant", "content": "aa"}]


def test_openai_function_call_format_is_read() -> None:
    """`function_call` of an assistant message, and the role `function` of its result."""
    found = read(
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    )
    assert found == [
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "name": "f", "content": "2"},
    ]
    assert read({"role": "assistant", "content": "x", "function_call": None}) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "function_call": "auto"},
        {"role": "assistant", "function_call": {"arguments": "{}"}},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}},
    ],
)
def test_invalid_function_calls_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"function_call|tool_calls"):
        read(message)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ({"name": "f"}, "cannot be read"),
        ("{", "cannot be read"),
        (3, "cannot be read"),
        (["f"], "cannot be read"),
        ([{"function": "f"}], "cannot be read"),
        ([{"name": "f", "arguments": "[" * 100_000}], "cannot be read"),
        ([{"function": {"arguments": {}}}], "has a call without a name"),
        ([{"function": {"name": "f", "arguments": "x y"}}], "cannot be read"),
        ([{"function": {"name": "f", "arguments": [1]}}], "the arguments of f are list"),
        ([{"name": "f", "arguments": "3"}], "the arguments of f are int"),
    ],
)
def test_invalid_tool_calls_are_reported_in_one_sentence(calls: Any, told: str) -> None:
    with pytest.raises(DataError, match=told) as error:
        read({"role": "assistant", "content": "", "tool_calls": calls})
    assert "tool_calls" in str(error.value) and "JSON text of an object" in str(error.value)


@pytest.mark.parametrize("calls", [[], "[]", '[{"name": "f", "arguments": "{}"}]', [{"function": {"name": "f"}}]])
def test_tool_calls_in_several_formats(calls: Any) -> None:
    assert read({"role": "assistant", "content": "", "tool_calls": calls})[0]["tool_calls"] == calls


@pytest.mark.parametrize(
    ("said", "meant"),
    [("gtp", "gpt"), ("asistant", "assistant"), ("Assistant", "assistant"), ("usr", "user"), ("hunan", "human")],
)
def test_misspelled_role_is_an_error_in_any_turn(said: str, meant: str) -> None:
    with pytest.raises(DataError, match=f"`messages.0.` has the role `{said}`(.|\n)*did you mean `{meant}`"):
        read({"role": said, "content": "a"})
    with pytest.raises(DataError, match=f"did you mean `{meant}`"):
        read(TURNS[0], {"from": said, "value": "a"})


@pytest.mark.parametrize("role", ["critic", "user_2", "observation", "ipython", "tool"])
def test_custom_roles_are_preserved(role: str) -> None:
    assert read({"role": role, "content": "a"})[0]["role"] == role


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "system", "content": None}, {"from": "human"}])
def test_user_message_without_content_is_an_error(message: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"`messages\[0\]` has no content"):
        read(message)


@pytest.mark.parametrize("arguments", ['{"a": 1', "{a: 1}", '{"a": 1}}'])
def test_broken_call_arguments_are_named(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(
        DataError, match=r"messages\[0\].tool_calls` cannot be read: in call 0, the arguments of add are broken JSON at"
    ):
        read({"role": "assistant", "content": "", "tool_calls": [call]})
