"""Lengths, drops and ratios: every row is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.prepare import (
    ANSWER_TOO_LONG,
    ASKED_NOTHING,
    EARLIER_TURNS,
    EMPTY_COMPLETION,
    KEPT_LONG,
    LABEL_UNREAD,
    NOTHING_ASKED,
    PROMPT_CUT,
    SAME_SIDES,
    TOO_LONG,
    prepare_examples,
    prepare_pairs,
    prepare_prompts,
)
from posttrain.errors import DataError
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.sections import Data

Write = Callable[[Iterable[dict[str, Any]]], str]

# Token counts with the tiny template: <bos> <|user|> prompt <|assistant|> completion <eos> = 4 + both lengths.
ROWS = [
    {"prompt": "short", "completion": "ok"},  # 4 + 5 + 2 = 11
    {"prompt": "a longer prompt", "completion": "yes"},  # 4 + 15 + 3 = 22
    {"prompt": "x", "completion": "an answer that goes on"},  # 4 + 1 + 22 = 27
    {"prompt": "empty", "completion": "  "},
]


def examples(path: str, tokenizer: Any, **keys: Any) -> Any:
    return prepare_examples(Data(source=path, **keys), tokenizer, Path.cwd())


def causes(prepared: Any) -> dict[str, int]:
    return {cause: len(uids) for cause, uids in (prepared.dropped | prepared.cut).items()}


def test_only_empty_answers_are_dropped_without_a_limit(tiny: Any, jsonl: Write) -> None:
    """Trained: 2+1, 3+1, 22+1 of 11, 22, 27 tokens: 30 of 60."""
    prepared = examples(jsonl(ROWS), tiny)
    assert [len(e.ids) for e in prepared.items] == [11, 22, 27]
    assert causes(prepared) == {EMPTY_COMPLETION: 1}
    assert prepared.dropped[EMPTY_COMPLETION] == [prepared.rows[3]["uid"]]
    assert prepared.trained_ratio == 30 / 60
    assert len(prepared) == 3


def test_conversations_without_assistant_turns_are_dropped_and_untrained_turns_reported(
    tiny: Any, jsonl: Write
) -> None:
    user, own = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    several = [user, own, user, own]
    unwanted = [user, {**own, "train": False}, user, own]
    rows = [{"messages": m} for m in ([], [user], several, unwanted)]
    prepared = examples(jsonl(rows), tiny)
    uids = [row["uid"] for row in prepared.rows]
    assert prepared.dropped == {
        "no assistant turn (roles: none)": uids[:1],
        "no assistant turn (roles: user)": uids[1:2],
    }
    assert prepared.noted == {EARLIER_TURNS: uids[2:3]}
    assert examples(jsonl(rows), tiny, train_on="assistant").noted == {}


def test_overlong_drop(tiny: Any, jsonl: Write) -> None:
    prepared = examples(jsonl(ROWS), tiny, max_length=20)
    assert [len(e.ids) for e in prepared.items] == [11]
    assert causes(prepared) == {TOO_LONG: 1, ANSWER_TOO_LONG: 1, EMPTY_COMPLETION: 1}


def test_truncate_prompt_cuts_the_start_of_the_prompt_never_the_answer(tiny: Any, jsonl: Write) -> None:
    """At 20 tokens, `yes<eos>` leaves 16 of 18 prompt tokens: BOS and the last 15. The third answer alone has 23."""
    prepared = examples(jsonl(ROWS), tiny, max_length=20, overlong="truncate_prompt")
    cut = prepared.items[1]
    assert tiny.decode(list(cut.ids)) == "<bos> longer prompt<|assistant|>yes<eos>"
    assert (len(cut.ids), sum(cut.trained), cut.trained[-4:]) == (20, 4, (True,) * 4)
    assert causes(prepared) == {PROMPT_CUT: 1, ANSWER_TOO_LONG: 1, EMPTY_COMPLETION: 1}


def test_overlong_keep_and_error(tiny: Any, jsonl: Write) -> None:
    prepared = examples(jsonl(ROWS), tiny, max_length=20, overlong="keep")
    assert [len(e.ids) for e in prepared.items] == [11, 22, 27]
    assert causes(prepared) == {KEPT_LONG: 2, EMPTY_COMPLETION: 1}
    with pytest.raises(DataError, match=r"22 tokens, over data\.max_length 20"):
        examples(jsonl(ROWS), tiny, max_length=20, overlong="error")


def test_no_remaining_rows_is_an_error_with_the_causes(tiny: Any, jsonl: Write) -> None:
    with pytest.raises(
        DataError, match=f"no row is left of 4: {TOO_LONG}: 2 .*; {ANSWER_TOO_LONG}: 1 .*; {EMPTY_COMPLETION}: 1 "
    ):
        examples(jsonl(ROWS), tiny, max_length=5)
    told = (
        "; data.max_length is 5, the rows that are longer have 11 to 27 tokens\n.*`data.max_length=27` takes these rows"
    )
    with pytest.raises(DataError, match=told):
        examples(jsonl(ROWS), tiny, max_length=5)
    with pytest.raises(DataError, match="have 11 tokens"):
        examples(jsonl(ROWS[:1]), tiny, max_length=5)


def test_training_on_every_token_is_an_error_unless_intended(jsonl: Write) -> None:
    """With an empty prompt and no token before it, only the answer remains, which looks like a lost mask."""
    path = jsonl([{"prompt": "", "completion": "abc"}])
    tokenizer = build_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(DataError, match="every token is trained on"):
        examples(path, tokenizer, chat=False)
    assert examples(path, tokenizer, chat=False, train_on="all").trained_ratio == 1


def test_prompt_lengths_and_truncated_prompt_text(tiny: Any, jsonl: Write) -> None:
    """Prompts of 3 + 5, 15, 1, 5 tokens."""
    path = jsonl(ROWS)
    kept = prepare_prompts(Data(source=path, max_length=10), tiny, Path.cwd())
    assert [len(p.ids) for p in kept.items] == [8, 4, 8]
    assert causes(kept) == {TOO_LONG: 1}
    cut = prepare_prompts(Data(source=path, max_length=10, overlong="truncate_prompt"), tiny, Path.cwd()).items[1]
    assert cut.text == "<bos>r prompt<|assistant|>"
    assert cut.ids == tuple(tiny(cut.text, add_special_tokens=False)["input_ids"])
    assert cut.row["completion"] == "yes"


def test_pair_length_is_that_of_the_longer_side(tiny: Any, jsonl: Write) -> None:
    """Prompt 3 + 1; sides 1 + 1 and 8 + 1: 13 tokens."""
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "too long"},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "a", "rejected": ""},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ]
    path = jsonl(rows)
    whole = prepare_pairs(Data(source=path, max_length=13), tiny, Path.cwd())
    assert causes(whole) == {SAME_SIDES: 1, EMPTY_COMPLETION: 1}
    assert [len(p.rejected_ids) for p in whole.items] == [9, 2]
    assert whole.trained_ratio == (2 + 9 + 2 + 2) / (6 + 13 + 6 + 6)
    assert causes(prepare_pairs(Data(source=path, max_length=12), tiny, Path.cwd()))[TOO_LONG] == 1
    cut = prepare_pairs(Data(source=path, max_length=12, overlong="truncate_prompt"), tiny, Path.cwd()).items[0]
    assert tiny.decode(list(cut.prompt_ids)) == "<bos>q<|assistant|>"


def test_eos_is_trained_although_smollm2_pads_with_it(smollm2: Any, jsonl: Write) -> None:
    prepared = examples(jsonl(ROWS), smollm2, train_on="assistant")
    assert all(e.ids[-1] == smollm2.pad_token_id and e.trained[-1] for e in prepared.items)
    assert 0 < prepared.trained_ratio < 1


def test_null_completion_is_reported_as_null(tiny: Any, jsonl: Write) -> None:
    with pytest.raises(DataError, match="`completion` is null"):
        examples(jsonl([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]), tiny)


def test_answers_to_empty_prompts_are_reported(tiny: Any, jsonl: Write) -> None:
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": " ", "completion": "c"},
        {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "d"}]},
        {"prompt": "", "completion": ""},  # dropped, so reported as dropped
    ]
    prepared = examples(jsonl(rows), tiny)
    assert prepared.noted == {ASKED_NOTHING: [str(row["uid"]) for row in prepared.rows[1:3]]}


def test_empty_prompts_to_sample_from_are_reported(tiny: Any, jsonl: Write) -> None:
    path = jsonl([{"prompt": "a"}, {"prompt": " "}, {"messages": [{"role": "user", "content": ""}]}])
    prepared = prepare_prompts(Data(source=path), tiny, Path.cwd())
    assert len(prepared.items) == 3
    assert prepared.noted == {NOTHING_ASKED: [str(row["uid"]) for row in prepared.rows[1:]]}


def test_rows_labelled_bad_are_reported_if_labels_are_not_read(tiny: Any, jsonl: Write) -> None:
    rows = [{"prompt": f"q{i}", "completion": "b", "label": label} for i, label in enumerate([True, False, 1, 0, "no"])]
    path = jsonl(rows)
    prepared = examples(path, tiny)
    assert prepared.noted == {LABEL_UNREAD: [str(prepared.rows[i]["uid"]) for i in (1, 3)]}
    assert examples(path, tiny, prompt_template="{prompt} {label}").noted == {}
    assert prepare_examples(Data(source=path), tiny, Path.cwd(), labels_read=True).noted == {}


def test_error_for_labelled_rows_names_the_loss_that_reads_labels(tiny: Any, jsonl: Write) -> None:
    path = jsonl([{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(DataError, match="algorithm: kto"):
        prepare_pairs(Data(source=path), tiny, Path.cwd())


def test_flags_of_parts_that_disagree_are_refused_only_where_they_are_trained_on(tiny: Any, jsonl: Write) -> None:
    parts = [{"type": "text", "text": "Hi ", "train": False}, {"type": "text", "text": "there", "train": True}]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "b"},
    ]
    path = jsonl([{"messages": turns}])
    with pytest.raises(DataError, match=r"`messages\[1\].content` has parts that are trained on"):
        examples(path, tiny, train_on="assistant")
    (prompt,) = prepare_prompts(Data(source=path), tiny, Path.cwd()).items
    assert "Hi there" in prompt.text
    pair = jsonl([{"prompt": "a", "chosen": [turns[1]], "rejected": [{"role": "assistant", "content": "no"}]}])
    with pytest.raises(DataError, match=r"`chosen\[0\].content` has parts that are trained on"):
        prepare_pairs(Data(source=pair), tiny, Path.cwd())
