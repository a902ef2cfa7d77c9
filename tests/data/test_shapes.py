"""Row formats."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.data.row_formats import normalize_row
from posttrain.errors import DataError

USER = {"role": "user", "content": "q"}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def normalize(row: dict[str, Any], template: str | None = None) -> dict[str, Any]:
    return normalize_row(row, "here", template)


def test_prompt_and_answer_keep_all_columns() -> None:
    row = {"prompt": "q", "answer": 7, "level": None}
    assert normalize(row) == row


def test_instruction_input_output() -> None:
    row = normalize({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert (row["prompt"], row["completion"], row["instruction"]) == ("Add.\n\n1 2", "3", "Add.")
    assert normalize({"instruction": "Add.", "input": "", "output": "3"})["prompt"] == "Add."


def test_history_of_alpaca_rows_comes_before_the_prompt() -> None:
    """LLaMA-Factory's and ms-swift's earlier turns, [question, answer] each."""
    history = [["first", "one"], ["second", "two"]]
    row = normalize({"instruction": "third", "output": "three", "history": history})
    talk = [
        *({"role": "user", "content": "first"}, assistant("one")),
        *({"role": "user", "content": "second"}, assistant("two")),
        {"role": "user", "content": "third"},
    ]
    assert (row["prompt"], row["completion"], row["history"]) == (talk, "three", history)
    pair = normalize({"prompt": "third", "chosen": "a", "rejected": "b", "history": history})
    assert (pair["prompt"], pair["chosen"]) == (talk, "a")
    assert normalize({"prompt": "third", "answer": "3", "history": history})["prompt"] == "third"  # a reward's column
    for other in ([], ["first", "one"], [["first", "one", "x"]], "first"):
        assert normalize({"prompt": "third", "completion": "c", "history": other})["prompt"] == "third"
    assert normalize({"question": "third", "history": history}, "{history} {question}")["prompt"].endswith("] third")


def test_sharegpt_turns_become_messages() -> None:
    row = normalize({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})
    assert row["messages"] == [USER, assistant("a")]


def test_messages_as_json_text_in_csv_files() -> None:
    assert normalize({"messages": '[{"role": "user", "content": "q"}]'})["messages"] == [USER]
    assert normalize({"prompt": '[{"a": 1}]'})["prompt"] == '[{"a": 1}]'  # a prompt that is JSON but not messages


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
        {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
        {"prompt": [USER], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        {"chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
        {"messages": [USER], "chosen": assistant("a"), "rejected": assistant("b")},
        {"messages": [USER], "chosen": "a", "rejected": "b"},
        {"messages": [USER], "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
        {"messages": [USER, assistant("a")], "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
        {"chosen": "q a", "rejected": "q b"},
    ],
)
def test_pairs_in_all_column_names(row: dict[str, Any]) -> None:
    pair = normalize(row)
    assert (pair["chosen"], pair["rejected"]) == ("a", "b")
    assert pair["prompt"] in ("q", [USER], "q ")


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("sides", [("a", "b"), ([assistant("a")], [assistant("b")])])
def test_prompt_of_a_pair_is_the_conversation_before_its_last_answer(column: str, sides: tuple[Any, Any]) -> None:
    """Many data sets keep the chosen conversation in `messages`, next to `chosen` and `rejected` with only the
    answers.
    """
    earlier = [USER, assistant("hello"), {"role": "user", "content": "and now?"}]
    pair = normalize({column: [*earlier, assistant("a")], "chosen": sides[0], "rejected": sides[1]})
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (earlier, "a", "b")


def test_empty_conversation_next_to_a_pair_is_not_its_prompt() -> None:
    pair = normalize({"messages": [], "chosen": "q a", "rejected": "q b"})
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("q ", "a", "b")


def test_the_prompt_of_text_pairs_ends_at_a_whole_word() -> None:
    pair = normalize({"chosen": "Human: hi\nwonder", "rejected": "Human: hi\nworld"})
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("Human: hi\n", "wonder", "world")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "chosen": "The a", "rejected": "The b"},  # Intel/orca_dpo_pairs, axolotl's `chatml.intel`
        {"input": "q", "chosen": "a", "rejected": "b"},  # argilla's, axolotl's `chatml.argilla`
        {"question": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
    ],
)
def test_error_for_a_pair_names_its_probable_prompt_column(row: dict[str, Any]) -> None:
    """Both answers begin with `The`, which is not a prompt."""
    with pytest.raises(DataError, match="the pair has no `prompt`; is it") as error:
        normalize(row)
    name = next(iter(row))
    assert f"columns: {{prompt: {name}}}" in str(error.value)
    made = normalize(row, f"So: {{{name}}}")
    sides = [side if isinstance(side, str) else side[0]["content"] for side in (row["chosen"], row["rejected"])]
    assert (made["prompt"], made["chosen"], made["rejected"]) == ("So: q", *sides)


def test_instruction_next_to_a_pair_is_its_prompt() -> None:
    """LLaMA-Factory's preference data in Alpaca's format."""
    pair = normalize({"instruction": "q", "input": "more", "chosen": "The a", "rejected": "The b"})
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("q\n\nmore", "The a", "The b")
    whole = {"instruction": "other words", "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]}
    assert normalize(whole)["prompt"] == [USER]


def test_template_can_use_the_common_prompt_of_both_sides() -> None:
    pair = normalize({"chosen": "q a", "rejected": "q b"}, "So: {prompt}")
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("So: q ", "a", "b")


def test_pairs_that_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="both must be of one kind"):
        normalize({"prompt": "q", "chosen": "a", "rejected": [assistant("b")]})
    with pytest.raises(DataError, match="begin with different messages: a pair is two answers to one prompt"):
        normalize({"chosen": [USER, assistant("a")], "rejected": [{"role": "user", "content": "z"}, assistant("b")]})
    with pytest.raises(
        DataError, match="`chosen` must be one assistant message after the prompt, not: assistant, user"
    ):
        normalize({"chosen": [USER, assistant("a"), USER, assistant("c")], "rejected": [USER, assistant("b")]})
    begun = [assistant("a look"), {"role": "tool", "content": "3"}]
    with pytest.raises(DataError, match="both begin with 2 same messages after the prompt"):
        normalize({"prompt": [USER], "chosen": [*begun, assistant("a")], "rejected": [*begun, assistant("b")]})
    with pytest.raises(DataError, match="begins with another conversation than `prompt`"):
        normalize({"prompt": "z", "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]})


def test_prompt_template_fills_columns_and_braces_can_be_written() -> None:
    row = normalize({"question": "1+1", "answer": "2"}, "Solve {question}. Write \\boxed{{}}.")
    assert row["prompt"] == "Solve 1+1. Write \\boxed{}."
    with pytest.raises(DataError, match="no column `qestion`") as error:
        normalize({"question": "1+1"}, "Solve {qestion}")
    assert "did you mean `question`?" in str(error.value)
    with pytest.raises(DataError, match="is no column name"):
        normalize({"question": "1+1"}, "Write \\boxed{}.")
    with pytest.raises(DataError, match="braces"):
        normalize({"question": "1+1"}, "Write {question")


def test_completion_template_makes_the_answer_from_columns() -> None:
    row = {"question": "1+1", "work": "one and one", "answer": 2}
    made = normalize_row(row, "here", "Solve {question}.", "<think>{work}</think>{answer}")
    assert (made["prompt"], made["completion"]) == ("Solve 1+1.", "<think>one and one</think>2")
    kept = normalize_row({"prompt": "1+1", "completion": "x", "answer": 2}, "here", None, "So {answer}.")
    assert (kept["prompt"], kept["completion"]) == ("1+1", "So 2.")
    with pytest.raises(DataError, match="here, completion_template  no column `anwser`"):
        normalize_row(row, "here", "{question}", "{anwser}")
    with pytest.raises(DataError, match=r"data\.completion_template: `\{\}` is no column name"):
        normalize_row(row, "here", "{question}", "{}")
    with pytest.raises(DataError, match="answers a prompt, and the row has none"):
        normalize_row({"messages": [USER, assistant("a")], "answer": 2}, "here", None, "{answer}")


def test_error_for_an_unknown_format_lists_columns_and_formats() -> None:
    with pytest.raises(DataError, match="no shape that is known; columns: Question, answer") as error:
        normalize({"Question": "x", "answer": "y"})
    assert "prompt + chosen + rejected" in str(error.value)
    assert "columns: {" in str(error.value)


@pytest.mark.parametrize(
    "calls",
    [
        "[{",
        [{"function": {"name": "f", "arguments": "{x: 1}"}}],
        [{"function": {"name": "f", "arguments": "{"}}],
        ["f"],
        5,
    ],
)
def test_error_for_unreadable_tool_calls_names_the_row(calls: Any) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(DataError, match=r"^here  `messages\[1\].tool_calls` cannot be read: "):
        normalize({"messages": [USER, turn]})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": None, "completion": "a"}, "`prompt` is null"),
        ({"text": None}, "`text` is null"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "`rejected` is null beside its counterpart"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, r"`rejected` is int \(3\), not text or messages"),
        ({"prompt": "a", "chosen": 1.5, "rejected": "b"}, r"`chosen` is float \(1.5\), not text"),
    ],
)
def test_nulls_and_values_of_wrong_types_are_named(row: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        normalize_row(row, "here")
