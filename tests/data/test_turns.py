"""Text that chat templates drop from rows, add to them, or move: located by position and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.data import render
from posttrain.data.template_spans import insert_probes
from posttrain.data.turns import ADDED_THOUGHT, EARLIER_PARTS, EARLIER_THOUGHTS, EMPTY_TURN, UNWANTED, Text
from posttrain.errors import DataError
from posttrain.recipe.sections import Data

Template = Callable[[str], Any]

START = "{% for m in messages %}<|{{ m.role }}|>"
END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEXT_ALONE = START + "{{ m.content }}<eos>" + END  # only supports content
CALLS_ALONE = (  # As Llama 3.1: a turn with a call contains nothing else
    START + "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>"
    "{% else %}{{ m.content }}{% endif %}<eos>" + END
)
NAMES_ALONE = START + "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}<eos>" + END
CHANNELS = (  # gpt-oss: the header holds words that answers have, too; the last turn ends in another token
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% if m.thinking and (loop.last or m.tool_calls) %}channel analysis<|tool|>{{ m.thinking }}<eos><|assistant|>"
    "{% endif %}{% if m.tool_calls %}to={{ m.tool_calls[0].function.name }} channel commentary<|tool|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|tool|>"
    "{% else %}channel final<|tool|>{{ m.content }}{% if loop.last %}<eos>{% else %}<pad>{% endif %}{% endif %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<eos>{% endif %}" + END
)
NO_THOUGHT_AFTERWARDS = (  # gpt-oss: the thought of a call is dropped once an answer follows
    "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking and messages[-1].role != 'assistant' or loop.last and "
    "m.thinking %}({{ m.thinking }}){% endif %}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.arguments | tojson }} {{ c.function.name }}]{% endfor %}"
    "{{ m.content }}<eos>" + END
)
FILLS_THOUGHT = (  # Qwen3: a last turn without a thought gets an empty one, earlier turns lose theirs
    "{% for m in messages %}{% set parts = m.content.split('</think>') %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else m.reasoning_content }}"
    "\n</think>\n\n{% endif %}"
    "{{ parts[-1].strip() }}<eos>" + END
)
CLOSED_THOUGHT = (  # Qwen3.5 without thinking: the prompt holds an empty thought
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n\n</think>\n\n{% endif %}"
)
PARTS = (  # models that see images: a content is a list of parts
    START + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<eos>" + END
)
TEXT_ARGUMENTS = (  # DeepSeek: arguments are text, and only a turn without any content is one of calls
    START + "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + '|' + c.function.arguments }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<eos>" + END
)
TRIMS = START + "{{ m.content | trim }}<eos>" + END
STRIPS_NOTES = (  # a template that takes a part out of what assistants say
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ m.content.split('<note>')[0] }}"
    "{{ m.content.split('</note>')[-1] if '</note>' in m.content }}{% else %}{{ m.content }}{% endif %}<eos>" + END
)
TWO_ENDS = START + "{{ m.content }}<|tool|><eos>" + END  # Cohere 2: the answer is closed, then the turn

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sums.", "parameters": {}}}]


def texts(tokenizer: Any, *messages: dict[str, Any], tools: Any = None, **keys: Any) -> list[Text]:
    row = {"uid": "u", "messages": [dict(m) for m in messages], "tools": tools}
    return render.example_texts(row, tokenizer, Data(source="x", **keys))


def list_trained_texts(found: list[Text]) -> list[str]:
    return [piece.text for text in found for piece in text.pieces if piece.trained]


@pytest.mark.parametrize(
    ("template", "messages", "field"),
    [
        (TEXT_ALONE, [USER, CALLING], "`tool_calls` of this assistant message ('add')"),
        (TEXT_ALONE, [USER, {**CALLING, "content": "I add."}], "`tool_calls`"),
        (TEXT_ALONE, [USER, CALLING, {"role": "tool", "content": "3"}, ANSWER], "tool_calls"),
        (NAMES_ALONE, [USER, CALLING], "`tool_calls` of this assistant message ('1')"),
        (CALLS_ALONE, [USER, {**CALLING, "content": "I add."}], "`content` of this assistant message ('I add.')"),
        (CALLS_ALONE, [USER, {**CALLING, "tool_calls": [CALL, CALL]}], "`tool_calls`"),
        (TEXT_ALONE, [USER, {"role": "assistant", "content": "a", "reasoning_content": "why"}], "`reasoning_content`"),
        (TEXT_ALONE, [USER, {"role": "assistant", "content": "a", "thinking": "why"}], "`thinking`"),
        (START.replace("messages", "messages[-1:]") + "{{ m.content }}<eos>" + END,
         [{"role": "system", "content": "Be kind."}, USER, ANSWER], "('Be kind.')"),
        ("{% for m in messages if m.role != 'developer' %}" + TEXT_ALONE[len("{% for m in messages %}"):],
         [{"role": "developer", "content": "Be kind."}, USER, ANSWER], "developer"),
    ],
)  # fmt: skip
def test_text_missing_from_the_rendering_is_an_error(
    with_template: Template, template: str, messages: list[dict[str, Any]], field: str
) -> None:
    tokenizer = with_template(template)
    with pytest.raises(DataError, match="the chat template does not write") as error:
        texts(tokenizer, *messages)
    assert field in str(error.value)
    assert "model.chat_template" in str(error.value)


@pytest.mark.parametrize("answer", ["final", "a", "channel final", "assistant", "to", "<", "commentary"])
def test_answer_is_not_searched_for_in_the_header(with_template: Template, answer: str) -> None:
    found = texts(with_template(CHANNELS), USER, {"role": "assistant", "content": answer})
    assert list_trained_texts(found) == [f"channel final<|tool|>{answer}<eos>"]


def test_call_and_thought_keep_their_headers(with_template: Template) -> None:
    tokenizer = with_template(CHANNELS)
    turn = {**CALLING, "thinking": "sum them"}
    assert list_trained_texts(texts(tokenizer, USER, turn)) == [
        "channel analysis<|tool|>sum them<eos><|assistant|>"
        'to=add channel commentary<|tool|>{"a": 1, "b": "two"}<|tool|>'
    ]
    thought = {"role": "assistant", "content": "3", "reasoning_content": "sum them"}  # another name for the same
    assert list_trained_texts(texts(tokenizer, USER, thought)) == [
        "channel analysis<|tool|>sum them<eos><|assistant|>channel final<|tool|>3<eos>"
    ]


def test_context_is_rendered_as_before_the_answer(with_template: Template) -> None:
    """When answering, the model sees the thought of its call, although the finished conversation no longer has it."""
    turns = [USER, {**CALLING, "thinking": "sum"}, {"role": "tool", "content": "3"}]
    (text,) = texts(with_template(NO_THOUGHT_AFTERWARDS), *turns, {"role": "assistant", "content": "three"})
    assert [piece.text for piece in text.pieces] == [
        '<|user|>q<eos><|assistant|>(sum)[{"a": 1, "b": "two"} add]<eos><|tool|>3<eos><|assistant|>',
        "three<eos>",
    ]


def test_empty_thought_added_by_the_template_is_reported(with_template: Template) -> None:
    tokenizer = with_template(FILLS_THOUGHT)
    (text,) = texts(tokenizer, USER, {"role": "assistant", "content": "4"})
    assert list_trained_texts([text]) == ["<think>\n\n</think>\n\n4<eos>"]
    assert text.notes == (ADDED_THOUGHT,)
    assert text.frames == ("<think>\n\n</think>\n\n…<eos>",)
    for own in ("<think>\nhm\n</think>\n\n4", "<think></think>4"):  # the row's own thought, empty or not
        (text,) = texts(tokenizer, USER, {"role": "assistant", "content": own})
        assert text.notes == ()
    (text,) = texts(tokenizer, USER, {"role": "assistant", "content": "4", "reasoning_content": "two twos"})
    assert (list_trained_texts([text]), text.notes) == (["<think>\ntwo twos\n</think>\n\n4<eos>"], ())


def test_dropped_thoughts_of_earlier_turns_are_reported(with_template: Template) -> None:
    turns = [USER, {"role": "assistant", "content": "<think>hm</think>4"}, USER]
    (text,) = texts(with_template(FILLS_THOUGHT), *turns, {"role": "assistant", "content": "<think>so</think>5"})
    assert text.notes == (EARLIER_THOUGHTS,)
    assert "hm" not in text.pieces[0].text


@pytest.mark.parametrize("closed", ["<think>\n\n</think>\n\n", "</think>"])
def test_answer_with_a_thought_is_refused_if_the_prompt_closes_the_thought(
    with_template: Template, closed: str
) -> None:
    tokenizer = with_template(CLOSED_THOUGHT.replace("<think>\n\n</think>\n\n", closed))
    assert list_trained_texts(texts(tokenizer, USER, {"role": "assistant", "content": "4"})) == ["4<eos>"]
    for turn in ({"content": "<think>hm</think>4"}, {"content": "4", "reasoning_content": "hm"}):
        with pytest.raises(DataError, match="leaves no room for the thought"):
            texts(tokenizer, USER, {"role": "assistant", **turn})


@pytest.mark.parametrize("closed", ["<think>\n\n</think>\n\n", "<think></think>", "</think>"])
@pytest.mark.parametrize("finished", ["", "</think>"])
def test_calls_are_trained_on_behind_an_empty_thought_of_the_prompt(
    with_template: Template, closed: str, finished: str
) -> None:
    """Finished turns have no thought, or only the mark that ends it."""
    turn = "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function }}]{% endfor %}<eos>"
    began = f"{{{{ '{finished}' if m.role == 'assistant' }}}}"
    tokenizer = with_template(START + began + turn + END.replace("<|assistant|>", "<|assistant|>" + closed))
    rows = [USER, CALLING, {"role": "tool", "content": "3"}, ANSWER]
    found = texts(tokenizer, *rows, tools=TOOLS, train_on="assistant")
    assert found[0].pieces[0].text == "<|user|>q<eos><|assistant|>" + closed
    assert list_trained_texts(found) == [f"[{CALL['function']}]<eos>", "a<eos>"]


def test_lost_text_not_written_by_the_model_is_only_reported(with_template: Template) -> None:
    tokenizer = with_template(TEXT_ALONE)
    named = {"role": "assistant", "content": "a", "name": "Ann", "mood": {"joy": 0.5}, "train": True, "id": "7"}
    (text,) = texts(tokenizer, {**USER, "name": "Bob"}, named, tools=TOOLS)
    assert text.notes == (
        "the chat template does not write `name` of user messages",
        "LOOK: the chat template does not write the row's `tools`",
        "the chat template does not write `name` of assistant messages",
        "the chat template does not write `mood` of assistant messages",
    )


def test_messages_are_converted_to_the_form_a_template_reads(with_template: Template) -> None:
    """Content parts, arguments as text, and turns without content."""
    assert list_trained_texts(texts(with_template(PARTS), USER, {"role": "assistant", "content": "a"})) == ["a<eos>"]
    assert list_trained_texts(texts(with_template(TEXT_ARGUMENTS), USER, CALLING)) == ['add|{"a": 1, "b": "two"}<eos>']


def test_end_of_answer_and_end_of_turn_are_both_trained(with_template: Template) -> None:
    assert list_trained_texts(texts(with_template(TWO_ENDS), USER, {"role": "assistant", "content": "a"})) == [
        "a<|tool|><eos>"
    ]


def test_texts_changed_by_the_template_are_found(with_template: Template) -> None:
    (text,) = texts(with_template(TRIMS), USER, {"role": "assistant", "content": "  a  "})
    assert (list_trained_texts([text]), text.notes) == (["a<eos>"], ())
    escaped = with_template(START + "{{ m.content | tojson }}<eos>" + END)
    (text,) = texts(escaped, USER, {"role": "assistant", "content": 'say "é"\n\tnow'})
    assert list_trained_texts([text]) == ['"say \\"é\\"\\n\\tnow"<eos>']


def test_text_removed_by_the_template_is_trained_and_reported_for_earlier_turns(with_template: Template) -> None:
    """The model must write the row's content, however the template shows it later."""
    tokenizer = with_template(STRIPS_NOTES)
    noted = {"role": "assistant", "content": "so <note>aside</note> yes"}
    (text,) = texts(tokenizer, USER, noted)
    assert (list_trained_texts([text]), text.notes) == (["so <note>aside</note> yes<eos>"], ())
    (text,) = texts(tokenizer, USER, noted, USER, ANSWER)
    assert text.notes == (EARLIER_PARTS,)
    with pytest.raises(DataError, match="does not write `content` of this assistant message"):
        texts(tokenizer, USER, {**noted, "content": "<note>all of it</note>"}, USER, ANSWER)


def test_untrained_turns_are_context_only_and_reported(with_template: Template) -> None:
    tokenizer = with_template(TEXT_ALONE)
    unwanted = {"role": "assistant", "content": "a", "train": False}
    for keys in ({}, {"train_on": "assistant"}):
        (text,) = texts(tokenizer, USER, unwanted, **keys)
        assert (list_trained_texts([text]), text.drop_cause) == ([], UNWANTED)
    (text,) = texts(tokenizer, USER, {"role": "assistant", "content": "b"}, USER, unwanted, train_on="assistant")
    assert "".join(piece.text for piece in text.pieces) == "<|user|>q<eos><|assistant|>b<eos>"
    (text,) = texts(
        tokenizer, USER, {**ANSWER, "content": ""}, USER, {**ANSWER, "tool_calls": []}, train_on="assistant"
    )
    assert text.notes == (EMPTY_TURN,)


def test_prompts_and_pairs_get_the_same_checks(with_template: Template) -> None:
    tokenizer = with_template(TEXT_ALONE)
    history = [USER, CALLING, {"role": "tool", "content": "3"}]
    with pytest.raises(DataError, match="does not write `tool_calls`"):
        render.prompt_text({"uid": "u", "messages": history}, tokenizer, Data(source="x"))
    with pytest.raises(DataError, match="does not write `tool_calls`"):
        render.pair_texts({"uid": "u", "prompt": history, "chosen": "a", "rejected": "b"}, tokenizer, Data(source="x"))
    thoughtful = [{"role": "assistant", "content": "a", "reasoning_content": "why"}]
    with pytest.raises(DataError, match="does not write `reasoning_content`"):
        row = {"uid": "u", "prompt": "q", "chosen": thoughtful, "rejected": "b"}
        render.pair_texts(row, tokenizer, Data(source="x"))
    prompt = render.prompt_text({"uid": "u", "prompt": "q", "tools": TOOLS}, tokenizer, Data(source="x"))
    assert prompt.notes == ("LOOK: the chat template does not write the row's `tools`",)


def test_every_text_of_a_message_is_replaced_by_a_probe() -> None:
    """White space, tags, roles and ids stay; texts, numbers and names are replaced."""
    turn = {
        "role": "assistant",
        "content": " <think>\nso\n</think>\n<b>x</b>",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["t", True]}}}
        ],
    }
    found = insert_probes([turn], TOOLS)
    assert found.messages[0]["content"] == " <think>\nx8q0x\n</think>\n<b>x8q1x</b>"
    function = found.messages[0]["tool_calls"][0]["function"]
    assert function == {"name": "x8q2x", "arguments": {"a": 730100003, "b": ["x8q4x", True]}}
    assert [(leaf.value, leaf.field, leaf.thought) for leaf in found.leaves] == [
        ("so", "content", True),
        ("x", "content", False),
        ("add", "tool_calls", False),
        (1, "tool_calls", False),
        ("t", "tool_calls", False),
        ("add", "tools", False),
        ("Sums.", "tools", False),
    ]
    assert insert_probes([{"role": "user", "content": "</b>"}]).messages[0]["content"] == "x8q0x"  # nothing but tags
