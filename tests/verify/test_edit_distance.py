"""Edit distance: equal to the dynamic-programming definition, fast enough for pages of text; ANLS as published."""

from __future__ import annotations

import random
import time

import pytest

from posttrain.verify.edit_distance import anls, edit_distance, similarity


def by_table(a: str, b: str) -> int:
    """Compute the Levenshtein distance by its recurrence, one table row at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def test_edit_distance_equals_the_dynamic_programming_table() -> None:
    draw = random.Random(0)
    for _ in range(500):
        a, b = ("".join(draw.choices("abc\N{GREEK SMALL LETTER ALPHA}", k=draw.randint(0, 11))) for _ in "ab")
        assert edit_distance(a, b) == edit_distance(b, a) == by_table(a, b)


def test_known_distances() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert similarity("", "") == 1


def test_long_pages_are_compared_quickly() -> None:
    draw = random.Random(0)
    a, b = ("".join(draw.choices("abcdefgh ", k=8000)) for _ in "ab")
    started = time.perf_counter()
    edit_distance(a, b)
    assert time.perf_counter() - started < 1


def test_anls_by_hand() -> None:
    """`hell` against `hello` has 1 of 5 wrong, against `help` 1 of 4: the nearest gold counts."""
    assert anls("hell", ["help", "hello"]) == pytest.approx(0.8)
    assert anls("HELLO  there", ["hello there"]) == 1
    assert anls("hexxx", ["hello"]) == 0, "0.4 is below one half"
    assert anls("x", []) == 0
