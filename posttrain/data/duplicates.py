"""Rows that ask the same as others of the data or as held-out rows: equal, nearly equal, or equal but for numbers.

Texts are compared by their words in lower case. Punctuation other than signs of arithmetic is no word, so `3 - 4` and
`3 + 4` differ. All functions are pure, and exact: no hashing scheme that finds a pair by chance.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

SHINGLE = 3  # words that are compared together
NEAR = 0.8  # share of common shingles from which on two texts are nearly the same
ASKS = ("user", "tool")  # roles of messages that belong to the question

_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[-+*/=<>^%]")
_NUMBER = re.compile(r"\d")


class Pair(NamedTuple):
    """Places of two texts, and the share of their shingles that both have (Jaccard index, 1 = the same words)."""

    first: int
    second: int
    similarity: float


def question(row: Row) -> str:
    """What a row asks: its prompt, the user's messages, or all of a plain text; with a name for each of its images."""
    if row.get("images"):
        named = [hashlib.sha256(str(image).encode()).hexdigest() for image in row["images"]]
        return "\n".join([question({**row, "images": None}), *named])
    asked = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    if asked is None:
        return str(row.get("text") or "")
    if isinstance(asked, str):
        return asked
    return "\n".join(str(m.get("content") or "") for m in asked if m.get("role") in ASKS)


def answer(row: Row) -> str:
    """What a row gives as its answer: a gold, a completion, the sides of a pair, or the assistant's last message."""
    for columns in (("chosen", "rejected"), ("completion",), ("answer",)):
        if any(row.get(column) is not None for column in columns):
            return "\0".join(str(row.get(column)).strip() for column in columns)
    said = [m.get("content") for m in row.get("messages") or () if m.get("role") == "assistant"]
    return str(said[-1]).strip() if said else ""


def words(text: str) -> tuple[str, ...]:
    """The words, numbers and signs of arithmetic of a text."""
    return tuple(_WORD.findall(text.lower()))


def same_words(texts: Sequence[str]) -> list[list[int]]:
    """The places of texts that have the same words in the same order: a list for each text that occurs again."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        groups[words(text) or (text.strip(),)].append(place)
    return [places for places in groups.values() if len(places) > 1]


def same_as(texts: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """(place, place of the first of `others` with the same words) of those texts that have one."""
    known: dict[tuple[str, ...], int] = {}
    for place, other in enumerate(others):
        known.setdefault(words(other) or (other.strip(),), place)
    keys = ((place, words(text) or (text.strip(),)) for place, text in enumerate(texts))
    return [(place, known[key]) for place, key in keys if key in known]


def near(texts: Sequence[str], others: Sequence[str] | None = None, *, least: float = NEAR) -> list[Pair]:
    """The pairs whose common shingles are at least the share `least` of all of theirs, without those of equal words.

    others: texts to pair with instead; a text is then paired with the most similar one. Two texts that differ in
    numbers alone are no pair: `but_for_numbers` counts them. Found by prefix filtering: of n shingles, rarest first,
    two such texts share one of the first n - ceil(least * n) + 1 (Chaudhuri et al., "A primitive operator for
    similarity joins in data cleaning", ICDE 2006).
    """
    own, theirs = [words(t) for t in texts], [words(t) for t in (texts if others is None else others)]
    kept = [_shingles(w) for w in own], [_shingles(w) for w in theirs]
    counts = Counter(s for shingles in (*kept[0], *kept[1]) for s in shingles)
    index: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    found: list[Pair] = []
    if others is not None:
        for place, shingles in enumerate(kept[1]):
            _enter(index, place, shingles, counts, least)
    for place, shingles in enumerate(kept[0]):
        candidates = {other for s in _prefix(shingles, counts, least) for other in index.get(s, ())}
        pairs = [
            Pair(place, other, similarity)
            for other in sorted(candidates)
            if (similarity := _jaccard(shingles, kept[1][other])) >= least
            and own[place] != theirs[other]
            and _without_numbers(own[place]) != _without_numbers(theirs[other])
        ]
        found += pairs if others is None else sorted(pairs, key=lambda pair: -pair.similarity)[:1]
        if others is None:
            _enter(index, place, shingles, counts, least)
    return found


def but_for_numbers(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """Places of the texts that have the words of one of `others` with other numbers: problems of one template."""
    known, same = {_without_numbers(words(o)) for o in others}, {words(o) for o in others}
    return [
        place
        for place, text in enumerate(texts)
        if (w := words(text)) not in same
        and any(map(str.isalpha, w))  # of numbers and signs alone every sum would be one
        and _without_numbers(w) in known
    ]


def _shingles(text: Sequence[str]) -> frozenset[tuple[str, ...]]:
    """All runs of `SHINGLE` words; of a shorter text itself."""
    if len(text) <= SHINGLE:
        return frozenset([tuple(text)] if text else [])
    return frozenset(tuple(text[i : i + SHINGLE]) for i in range(len(text) - SHINGLE + 1))


def _prefix(
    shingles: Iterable[tuple[str, ...]], counts: Mapping[tuple[str, ...], int], least: float
) -> list[tuple[str, ...]]:
    ordered = sorted(shingles, key=lambda s: (counts[s], s))
    return ordered[: len(ordered) - math.ceil(least * len(ordered)) + 1] if ordered else []


def _enter(
    index: defaultdict[tuple[str, ...], list[int]],
    place: int,
    shingles: Iterable[tuple[str, ...]],
    counts: Mapping[tuple[str, ...], int],
    least: float,
) -> None:
    for shingle in _prefix(shingles, counts, least):
        index[shingle].append(place)


def _jaccard(a: frozenset[Any], b: frozenset[Any]) -> float:
    common = len(a & b)
    return common / max(len(a) + len(b) - common, 1)


def _without_numbers(text: Sequence[str]) -> tuple[str, ...]:
    return tuple("0" if _NUMBER.search(word) else word for word in text)
