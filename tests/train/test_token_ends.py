"""Character position in a completion's text at which each token ends."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout, Segment, Variant
from posttrain.models import tiny
from posttrain.train import scoring as module
from posttrain.train.scoring import completion_token_ends, ends_of_parts, token_ends


def test_token_ends_match_the_decoded_text() -> None:
    _, tokenizer = tiny.build(0)
    text = "<think>ab 1</think>4"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert token_ends(ids, tokenizer) == [7, 8, 9, 10, 11, 19, 20]
    assert token_ends([], tokenizer) == []


class Dropping:
    """A tokenizer whose words include their leading space, which is dropped at the start of a text."""

    def __len__(self) -> int:
        return 3

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["".join([" a", " bc", "d"][i] for i in row).removeprefix(" ") for row in rows]


def test_leading_space_is_counted() -> None:
    """`a bcd`: 1, then 4 with the space, then 5."""
    assert token_ends([0, 1, 2], Dropping()) == [1, 4, 5]


def test_token_cache_is_per_tokenizer_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair is decoded once, also next to new ones; the cache is bounded; another tokenizer has its own cache."""
    monkeypatch.setattr(module, "MAX_CACHED", 4)
    asked: list[list[int]] = []

    class Counting(Dropping):
        def batch_decode(self, rows: list[list[int]], **settings: Any) -> list[str]:
            asked.extend(rows)
            return super().batch_decode(rows, **settings)

    tokenizer = Counting()
    assert token_ends([0, 1, 2], tokenizer) == token_ends([0, 1, 2], tokenizer) == [1, 4, 5]
    assert asked == [[0], [1], [2], [0, 1], [1, 2]]
    assert token_ends([0, 1, 0], tokenizer) == [1, 4, 6] and asked[5:] == [[1, 0]]
    assert token_ends([0, 1, 2], tokenizer) == [1, 4, 5] and len(asked) == 11
    assert token_ends([0, 1], Counting()) == [1, 4] and len(asked) == 14


def test_a_beginning_that_belongs_to_the_prompt_shifts_the_tokens_of_the_answer() -> None:
    """The text is `a`, `b`, `c` on lines of their own, and `a` is part of the prompt: no token ends its step."""
    tokenizer = tiny.build_tokenizer()
    begin, ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("a\n", "b\nc"))
    rollout = Rollout(Prompt("p", {}, "", (1,)), 0, (Segment("model", ids),), "a\nb\nc", "stop", 0)
    rollout.variant = Variant(begin=begin)
    assert completion_token_ends(rollout, tokenizer) == [2, 3, 4, 5]
    assert ends_of_parts(rollout, "lines", tokenizer) == (-1, 1, 2)
    rollout.variant, rollout.text = None, "b\nc"
    assert completion_token_ends(rollout, tokenizer) == [0, 1, 2, 3]
    assert ends_of_parts(rollout, "lines", tokenizer) == (1, 2)
