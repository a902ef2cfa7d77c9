"""Which tokens are trained on; expected sequences show trained runs in [brackets]."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from posttrain import chat
from posttrain.data.render import (
    OPENING_TURN,
    OTHERS_MARKED,
    TEMPLATE_VARIABLES,
    TRAILING_MESSAGES,
    Example,
    encode,
    example_texts,
    join_pair,
    pair_texts,
    plain_text,
    render_example,
    render_examples,
    render_prompt,
)
from posttrain.data.row_formats import normalize_row
from posttrain.errors import DataError
from posttrain.recipe.sections import Data

TURNS = [
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "<think>a</think>2"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "<think>b</think>bye"},
]
ROW = {"uid": "u", "prompt": "1+1=?", "completion": "<think>a</think>2"}
TALK = {"uid": "t", "messages": TURNS}


def section(**keys: Any) -> Data:
    return Data(source="unused", **keys)


def mark_trained(example: Example, tokenizer: Any) -> str:
    """Return the sequence as text with trained runs in [brackets]."""
    text, inside = "", False
    for token, trained in zip(example.ids, example.trained, strict=True):
        text += ("[" if trained and not inside else "]" if inside and not trained else "") + tokenizer.decode([token])
        inside = trained
    return text + ("]" if inside else "")


# --- tiny: `<bos>`, then every turn as `<|role|>content`; assistant turns end with `<eos>`


def test_completion_trains_the_last_turn_with_its_eos(tiny: Any) -> None:
    assert (
        mark_trained(render_example(ROW, tiny, section()), tiny)
        == "<bos><|user|>1+1=?<|assistant|>[<think>a</think>2<eos>]"
    )
    assert mark_trained(render_example(TALK, tiny, section()), tiny) == (
        "<bos><|user|>1+1=?<|assistant|><think>a</think>2<eos><|user|>ok<|assistant|>[<think>b</think>bye<eos>]"
    )


def test_the_mask_by_hand(tiny: Any) -> None:
    """<bos> <|user|> q <|assistant|> a b <eos>: 7 tokens, the last three are trained."""
    example = render_example({"uid": "u", "prompt": "q", "completion": "ab"}, tiny, section())
    ids = tiny.convert_tokens_to_ids(["<bos>", "<|user|>", "q", "<|assistant|>", "a", "b", "<eos>"])
    assert example.ids == tuple(ids)
    assert example.trained == (False,) * 4 + (True,) * 3


def test_assistant_trains_every_turn_and_all_trains_everything(tiny: Any) -> None:
    assert mark_trained(render_example(TALK, tiny, section(train_on="assistant")), tiny) == (
        "<bos><|user|>1+1=?<|assistant|>[<think>a</think>2<eos>]<|user|>ok<|assistant|>[<think>b</think>bye<eos>]"
    )
    assert all(render_example(TALK, tiny, section(train_on="all")).trained)


def test_turns_after_the_last_assistant_turn_are_dropped(tiny: Any) -> None:
    row = {"uid": "u", "messages": [*TURNS, {"role": "user", "content": "more?"}]}
    assert render_example(row, tiny, section()).ids == render_example({**TALK, "uid": "u"}, tiny, section()).ids


def test_every_turn_of_a_completion_is_trained_and_those_of_its_prompt_are_not(tiny: Any) -> None:
    """Rows of TRL whose completion is a call, its result and the answer."""
    row = {"uid": "u", "prompt": TURNS[:3], "completion": [TURNS[3], {"role": "tool", "content": "3"}, TURNS[1]]}
    assert mark_trained(render_example(row, tiny, section()), tiny) == (
        "<bos><|user|>1+1=?<|assistant|><think>a</think>2<eos><|user|>ok<|assistant|>[<think>b</think>bye<eos>]"
        "<|tool|>3<|assistant|>[<think>a</think>2<eos>]"
    )
    unwanted = {**row, "completion": [{**TURNS[3], "train": False}, *row["completion"][1:]]}
    found = mark_trained(render_example(unwanted, tiny, section()), tiny)
    assert found.endswith("bye<eos><|tool|>3<|assistant|>[<think>a</think>2<eos>]") and found.count("[") == 1
    both = render_example(row, tiny, section(train_on="assistant"))
    assert mark_trained(both, tiny).count("[") == 3


def test_assistant_turn_without_a_message_before_it_is_context(tiny: Any) -> None:
    """ShareGPT conversations that begin with the assistant's greeting."""
    greeting = {"role": "assistant", "content": "Hi"}
    row = {"uid": "u", "messages": [greeting, *TURNS]}
    found = render_example(row, tiny, section(train_on="assistant"))
    assert mark_trained(found, tiny).startswith("<bos><|assistant|>Hi<eos><|user|>1+1=?<|assistant|>[")
    assert [text.notes for text in example_texts(row, tiny, section(train_on="assistant"))] == [(OPENING_TURN,)]
    assert render_example(row, tiny, section()).ids == found.ids
    for train_on in ("assistant", "completion", "all"):
        (alone,) = example_texts({"uid": "u", "messages": [greeting]}, tiny, section(train_on=train_on))
        assert (alone.drop_cause, alone.pieces[0].trained) == ("no message before the assistant turn", False)


def test_assistant_turn_after_only_a_system_message_is_context(tiny: Any) -> None:
    """The system message, of the row or the recipe, does not change what is trained on."""
    rule, greeting = {"role": "system", "content": "Be brief"}, {"role": "assistant", "content": "Hi"}
    alone = {"uid": "u", "messages": [greeting, *TURNS]}
    every = section(train_on="assistant")
    expected = render_example(alone, tiny, every)
    trained = [t for t, own in zip(expected.ids, expected.trained, strict=True) if own]
    for row, how in (
        ({"uid": "u", "messages": [rule, *alone["messages"]]}, every),
        ({**alone, "system": "Be brief"}, every),
        (alone, section(train_on="assistant", system="Be brief")),
    ):
        found = render_example(row, tiny, how)
        assert [t for t, own in zip(found.ids, found.trained, strict=True) if own] == trained
        assert [text.notes for text in example_texts(row, tiny, how)] == [(OPENING_TURN,)]


def test_assistant_turn_that_answers_a_system_message_alone_is_trained_on(tiny: Any) -> None:
    talk = [{"role": "system", "content": "Write a poem"}, {"role": "assistant", "content": "Hi"}]
    for messages in (talk, [*talk, {"role": "user", "content": "ok"}]):
        (text,) = example_texts({"uid": "u", "messages": messages}, tiny, section(train_on="assistant"))
        assert [piece.text for piece in text.pieces if piece.trained] == ["Hi<eos>"]
        assert OPENING_TURN not in text.notes


def test_train_flag_of_a_message_that_the_model_does_not_write_is_reported(tiny: Any) -> None:
    row = {"uid": "u", "messages": [{**TURNS[0], "train": True}, TURNS[1]]}
    (text,) = example_texts(row, tiny, section(train_on="assistant"))
    assert text.notes == (OTHERS_MARKED,)
    assert [piece.trained for piece in text.pieces] == [False, True]


def test_system_column_becomes_the_system_message(tiny: Any) -> None:
    """As in LLaMA-Factory's Alpaca and ShareGPT data, and in axolotl's `alpaca_w_system` and `chatml.intel`."""
    for row in (ROW, TALK):
        found = mark_trained(render_example({**row, "system": "Be brief."}, tiny, section(system="S")), tiny)
        assert found.startswith("<bos><|system|>Be brief.<|user|>")
    own = {"uid": "u", "messages": [{"role": "system", "content": "mine"}, *TURNS[:2]], "system": "Be brief."}
    assert mark_trained(render_example(own, tiny, section()), tiny).startswith("<bos><|system|>mine<|user|>")
    blank = {**ROW, "system": " "}
    assert mark_trained(render_example(blank, tiny, section(system="S")), tiny).startswith("<bos><|system|>S<|user|>")
    assert plain_text({**ROW, "system": "Be brief."}, "prompt", section(chat=False)) == f"Be brief.\n\n{ROW['prompt']}"


def test_recipe_system_message_is_added_if_the_row_has_none(tiny: Any) -> None:
    own = {"uid": "u", "messages": [{"role": "system", "content": "mine"}, *TURNS[:2]]}
    assert mark_trained(render_example(ROW, tiny, section(system="S")), tiny).startswith("<bos><|system|>S<|user|>")
    assert mark_trained(render_example(own, tiny, section(system="S")), tiny).startswith("<bos><|system|>mine<|user|>")


def test_tool_calls_are_trained_and_tool_results_are_not(tiny: Any) -> None:
    """Arguments as JSON text (OpenAI's format) and a tools column as JSON text; null content as in tables."""
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "uid": "u",
        "tools": json.dumps([{"name": "add"}]),
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"},
        ],
    }
    assert mark_trained(render_example(row, tiny, section(train_on="assistant")), tiny) == (
        '<bos><|system|>{"name": "add"}\n<|user|>q<|assistant|>'
        '[<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>]<|tool|>2<|assistant|>[two<eos>]'
    )


def test_parameters_of_tools_may_be_json_text(tiny: Any) -> None:
    """axolotl's form for tools whose parameters have different types."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    as_object, as_text = ({"name": "add", "parameters": form} for form in (schema, json.dumps(schema)))
    for objects, texts in (([as_object], [as_text]), ([{"function": as_object}], [{"function": as_text}])):
        found = mark_trained(render_example({**ROW, "tools": texts}, tiny, section()), tiny)
        assert found == mark_trained(render_example({**ROW, "tools": objects}, tiny, section()), tiny)
        assert json.dumps(schema) in found
    with pytest.raises(DataError, match=r"`tools`: the parameters of add are text and no JSON"):
        render_example({**ROW, "tools": [{"name": "add", "parameters": "{a"}]}, tiny, section())


def test_prompts_are_the_conversation_before_the_assistant_turn(tiny: Any) -> None:
    prompt = render_prompt(TALK, tiny, section())
    assert prompt.text == "<bos><|user|>1+1=?<|assistant|><think>a</think>2<eos><|user|>ok<|assistant|>"
    assert prompt.ids == tuple(tiny(prompt.text, add_special_tokens=False)["input_ids"])
    assert render_prompt(ROW, tiny, section()).text == "<bos><|user|>1+1=?<|assistant|>"
    example = render_example(ROW, tiny, section())
    assert example.ids[: len(render_prompt(ROW, tiny, section()).ids)] == render_prompt(ROW, tiny, section()).ids


def test_pairs_share_the_prompt_and_both_sides_end_with_eos(tiny: Any) -> None:
    row = {"uid": "u", "prompt": "q", "chosen": "a", "rejected": "bc"}
    pair = join_pair("u", *encode(pair_texts(row, tiny, section()), tiny, section()))
    decoded = [tiny.decode(list(ids)) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)]
    assert decoded == ["<bos><|user|>q<|assistant|>", "a<eos>", "bc<eos>"]


def test_sides_of_pairs_can_be_tool_calls(tiny: Any) -> None:
    def calling(name: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": {}}}]}]

    row = normalize_row({"prompt": "q", "chosen": calling("add"), "rejected": calling("sub")}, "f:1")
    pair = join_pair("u", *encode(pair_texts({"uid": "u", **row}, tiny, section()), tiny, section()))
    assert [tiny.decode(list(ids)) for ids in (pair.chosen_ids, pair.rejected_ids)] == [
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call><eos>' for name in ("add", "sub")
    ]


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({**ROW, "system": "Be brief."}, []),
        ({**ROW, "system_prompt": "Be brief."}, ["system_prompt"]),
        ({"uid": "u", "messages": [{"role": "system", "content": "mine"}, *TURNS], "system": "Be brief."}, ["system"]),
        ({**ROW, "reasoning": "one", "history": [["a"]], "source": "x", "tool_calls": []}, ["history", "reasoning"]),
        ({**TALK, "system": "", "thinking": None}, []),
        ({**TALK, "prompt": "1+1=?", "completion": "other"}, ["completion"]),
        ({"uid": "u", "messages": [{"role": "system", "content": "Be brief."}, *TURNS], "system": "Be brief."}, []),
    ],
)  # fmt: skip
def test_text_columns_used_in_no_message_are_reported(tiny: Any, row: dict[str, Any], lost: list[str]) -> None:
    (text,) = example_texts(row, tiny, section())
    assert sorted(text.notes) == [f"LOOK: the column `{column}` is in no message" for column in lost]


def test_history_of_an_alpaca_row_is_rendered(tiny: Any) -> None:
    row = normalize_row({"instruction": "2", "output": "3", "history": [["0", "1"]]}, "here")
    (text,) = example_texts({"uid": "u", **row}, tiny, section(train_on="assistant"))
    assert text.notes == ()
    assert "".join(f"[{piece.text}]" if piece.trained else piece.text for piece in text.pieces) == (
        "<bos><|user|>0<|assistant|>[1<eos>]<|user|>2<|assistant|>[3<eos>]"
    )


def test_row_with_variables_for_the_template_is_reported(tiny: Any) -> None:
    """TRL hands `chat_template_kwargs` to the template; here a row with `enable_thinking: false` renders as without."""
    row, notes = {**ROW, "chat_template_kwargs": {"enable_thinking": False}}, (TEMPLATE_VARIABLES,)
    assert example_texts(row, tiny, section())[0].notes == notes
    assert [text.notes for text in pair_texts({**row, "chosen": "a", "rejected": "b"}, tiny, section())] == [notes] * 2
    assert example_texts({**row, "chat_template_kwargs": {}}, tiny, section())[0].notes == ()
    assert example_texts(row, tiny, section(chat=False))[0].notes == ()


def test_column_in_the_prompt_template_counts_as_used(tiny: Any) -> None:
    row = {**ROW, "system": "Be brief.", "prompt": "Be brief.\n1+1=?"}
    (text,) = example_texts(row, tiny, section(prompt_template="{system}\n{prompt}"))
    assert text.notes == ()


def test_text_after_the_last_trained_turn_is_reported(tiny: Any) -> None:
    row = {"uid": "u", "messages": [*TURNS, {"role": "user", "content": "more?"}]}
    for train_on in ("completion", "assistant", "all"):
        (text,) = example_texts(row, tiny, section(train_on=train_on))
        assert text.notes == (TRAILING_MESSAGES,)


def test_plain_text_without_a_template(tiny: Any) -> None:
    row = {"uid": "u", "prompt": "1+1=", "completion": "2"}
    assert mark_trained(render_example(row, tiny, section(chat=False)), tiny) == "1+1=[2<eos>]"
    assert mark_trained(render_example({**row, "prompt": ""}, tiny, section(chat=False)), tiny) == "<bos>[2<eos>]"
    assert mark_trained(render_example(row, tiny, section(chat=False, train_on="all")), tiny) == "[1+1=2<eos>]"
    assert render_prompt(row, tiny, section(chat=False)).text == "1+1="
    with pytest.raises(DataError, match="`chat: false` cannot write"):
        render_example({"uid": "u", "prompt": [TURNS[0]], "completion": "x"}, tiny, section(chat=False))


def test_history_of_an_alpaca_row_is_refused_by_plain_text_until_it_is_left_out(tiny: Any) -> None:
    row = {"uid": "u", "instruction": "2", "output": "3", "history": [["0", "1"]]}
    with pytest.raises(DataError, match="`history` holds earlier turns, which `chat: false` cannot write") as told:
        render_example(normalize_row(row, "here"), tiny, section(chat=False))
    template = str(told.value).rpartition("data.prompt_template: '")[2].rstrip("'`")
    found = render_example(normalize_row(row, "here", template), tiny, section(chat=False, prompt_template=template))
    assert mark_trained(found, tiny) == "2[3<eos>]"


def test_text_only_rows_need_train_on_all(tiny: Any) -> None:
    assert (
        mark_trained(render_example({"uid": "u", "text": "abc"}, tiny, section(train_on="all")), tiny) == "[abc<eos>]"
    )
    with pytest.raises(DataError, match="no prompt to leave out"):
        render_example({"uid": "u", "text": "abc"}, tiny, section())


def test_error_for_rows_without_an_answer_names_the_missing_column(tiny: Any) -> None:
    with pytest.raises(DataError, match="no `completion` to train on") as error:
        render_example({"uid": "u", "prompt": "q", "answer": "7"}, tiny, section())
    assert "columns: {completion: answer}" in str(error.value)
    with pytest.raises(DataError) as error:
        render_example({"uid": "u", "prompt": "q", "answer": "7", "response": "It is 7."}, tiny, section())
    assert "columns: {completion: response}" in str(error.value)
    with pytest.raises(DataError, match="no `chosen` and `rejected`"):
        pair_texts(ROW, tiny, section())


def test_error_for_tools_that_are_not_json_names_the_row(tiny: Any) -> None:
    with pytest.raises(DataError, match="`tools` is text and no JSON"):
        render_example({**ROW, "tools": "[{"}, tiny, section())
    for tools in ({"a": 1}, ["f"], '{"a": 1}', 3):
        with pytest.raises(DataError, match=r"`tools` is .*\n.*a list of JSON schemas"):
            render_example({**ROW, "tools": tools}, tiny, section())


# --- templates with special behavior

STRIPS_THINKING = (  # As Qwen3: earlier turns lose their thinking
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}<eos>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENS_THINK = (  # As DeepSeek-R1: the prompt opens <think>, every finished turn loses its thinking
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}## {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}## assistant\n{% endif %}"
)
OTHER_END = (  # As Gemma: a turn ends with a token other than EOS, followed by a newline
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|tool|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_templates_that_strip_thinking_give_one_sequence_per_turn(with_template: Callable[[str], Any]) -> None:
    """Each turn as it was generated: with its thinking, after earlier turns without theirs."""
    tokenizer = with_template(STRIPS_THINKING)
    found = render_examples(TALK, tokenizer, section(train_on="assistant"))
    assert [mark_trained(e, tokenizer) for e in found] == [
        "<|user|>1+1=?<|assistant|>[<think>a</think>2<eos>]",
        "<|user|>1+1=?<|assistant|>2<eos><|user|>ok<|assistant|>[<think>b</think>bye<eos>]",
    ]
    assert [e.uid for e in found] == ["t.0", "t.1"]
    with pytest.raises(DataError, match="several sequences"):
        render_example(TALK, tokenizer, section(train_on="assistant"))


def test_think_opened_by_the_prompt_is_not_repeated(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(OPENS_THINK)
    assert mark_trained(render_example(ROW, tokenizer, section()), tokenizer) == (
        "<|user|>1+1=?<|assistant|><think>\n[a</think>2<eos>]"
    )
    with pytest.raises(DataError, match="the answer never closes it"):
        render_example({**ROW, "completion": "2"}, tokenizer, section())


def test_template_without_an_end_of_turn_gets_eos(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(NO_END)
    assert mark_trained(render_example(ROW, tokenizer, section()), tokenizer) == (
        "## user\n1+1=?\n## assistant\n[<think>a</think>2<eos>]"
    )


def test_end_of_turn_comes_from_the_template_and_nothing_after_it_is_trained(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template(OTHER_END)
    row = {**ROW, "completion": "o"}  # a letter that the end-of-turn token's own text has, too
    assert (
        mark_trained(render_example(row, tokenizer, section()), tokenizer)
        == "<|user|>1+1=?<|tool|>\n<|assistant|>[o<|tool|>]"
    )


def test_error_of_a_template_is_quoted(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"refuses the messages \(user\): TemplateError: no system role") as error:
        render_prompt(ROW, tokenizer, section())
    assert "data.system" not in str(error.value)
    with pytest.raises(DataError, match=r"refuses the messages \(system, user\)") as error:
        render_prompt(ROW, tokenizer, section(system="Be brief."))
    assert "hint: the system message comes from" in str(error.value) and "`data.system`" in str(error.value)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template") as error:
        render_prompt(ROW, tokenizer, section())
    assert "data.chat: false" in str(error.value)


def test_endless_template_is_stopped(with_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.chat.RENDER_SECONDS", 0.2)
    loops = "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DataError, match=r"has not ended after 0\.2 s"):
        render_prompt(ROW, with_template(loops), section())
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_template_time_limit_counts_process_time(
    with_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, time passes in which this process does not run; it does not count against the limit."""
    monkeypatch.setattr("posttrain.chat.RENDER_SECONDS", 0.2)
    tokenizer = with_template("{{ messages[0]['content'] }}")
    write = tokenizer.apply_chat_template

    def slowly(*args: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return write(*args, **more)

    monkeypatch.setattr(tokenizer, "apply_chat_template", slowly)
    assert "1+1" in chat.render(tokenizer, [{"role": "user", "content": "1+1=?"}])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# --- SmolLM2: a real BPE tokenizer; pad = EOS = <|im_end|>; its template puts "\n" behind each turn

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_smollm2_every_assistant_turn(smollm2: Any) -> None:
    example = render_example(TALK, smollm2, section(train_on="assistant"))
    assert mark_trained(example, smollm2) == (
        SYSTEM + "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n[<think>a</think>2<|im_end|>]\n"
        "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n[<think>b</think>bye<|im_end|>]"
    )


def test_smollm2_trains_eos_although_it_is_the_padding_token(smollm2: Any) -> None:
    """Four <|im_end|> in the sequence: only the one that ends the model's turn is trained on, by its position."""
    assert smollm2.pad_token_id == smollm2.eos_token_id == 2
    example = render_example(TALK, smollm2, section())
    assert [t for i, t in zip(example.ids, example.trained, strict=True) if i == 2] == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_smollm2_token_spanning_prompt_and_answer_is_split(smollm2: Any) -> None:
    """`hello` is one token, but the model is given only `hel` and has to write `lo there` after its tokens."""
    row = {"uid": "u", "prompt": "hel", "completion": "lo there"}
    assert len(smollm2("hello there")["input_ids"]) == 2
    example = render_example(row, smollm2, section(chat=False))
    prompt = render_prompt(row, smollm2, section(chat=False)).ids
    assert example.ids[: len(prompt)] == prompt
    assert mark_trained(example, smollm2) == "hel[lo there<|im_end|>]"
