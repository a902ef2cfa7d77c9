"""Where each token ends in the text of a completion."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.models import tiny
from posttrain.train import scoring as module
from posttrain.train.scoring import token_ends


def test_ends_are_those_of_the_decoded_text() -> None:
    _, tokenizer = tiny.build(0)
    text = "<think>ab 1</think>4"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert token_ends(ids, tokenizer) == [7, 8, 9, 10, 11, 19, 20]
    assert token_ends([], tokenizer) == []


class Dropping:
    """A tokenizer whose words carry their blank, which is dropped at the start of a text."""

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["".join([" a", " bc", "d"][i] for i in row).removeprefix(" ") for row in rows]


def test_a_leading_blank_is_not_lost() -> None:
    """`a bcd`: 1, then 4 with the blank, then 5."""
    assert token_ends([0, 1, 2], Dropping()) == [1, 4, 5]


def test_what_is_known_of_tokens_is_that_of_their_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair is decoded once, also beside new ones; too many are forgotten; another tokenizer knows none of them."""
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
