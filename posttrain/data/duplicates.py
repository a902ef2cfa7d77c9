"""Detection of duplicate questions in the data or held-out rows: equal, near-equal, or equal except numbers.

Texts are compared as lower-cased words. Arithmetic signs count as words and other punctuation is ignored, so `3 - 4`
and `3 + 4` differ. All functions are pure and exact: no hashing scheme that finds a pair only with some probability.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

SHINGLE = 3  # words per shingle
NEAR = 0.8  # Jaccard index of the shingles from which two texts count as near-duplicates
QUESTION_ROLES = ("user", "tool")  # roles of messages that belong to the question

_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[-+*/=<>^%]")
_NUMBER = re.compile(r"\d")


class Pair(NamedTuple):
    """Indices of two texts and the Jaccard index of their shingles (1 = the same words)."""

    first: int
    second: int
    similarity: float


def question(row: Row) -> str:
    """Return the question of a row: its prompt, user messages, or plain text, plus a hash of each of its images."""
    if row.get("images"):
        named = [hashlib.sha256(str(image).encode()).hexdigest() for image in row["images"]]
        return "\n".join([question({**row, "images": None}), *named])
    asked = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    if asked is None:
        return str(row.get("text") or "")
    if isinstance(asked, str):
        return asked
    return "\n".join(str(m.get("content") or "") for m in asked if m.get("role") in QUESTION_ROLES)


def answer(row: Row) -> str:
    """Return the reference answer of a row: chosen and rejected, completion, answer, or last assistant message."""
    for columns in (("chosen", "rejected"), ("completion",), ("answer",)):
        if any(row.get(column) is not None for column in columns):
            return "\0".join(str(row.get(column)).strip() for column in columns)
    said = [m.get("content") for m in row.get("messages") or () if m.get("role") == "assistant"]
    return str(said[-1]).strip() if said else ""


def words(text: str) -> tuple[str, ...]:
    """Return the words, numbers and arithmetic signs of a text, lower-cased."""
    return tuple(_WORD.findall(text.lower()))


def group_same_words(texts: Sequence[str]) -> list[list[int]]:
    """Return groups of indices of texts with the same words in the same order; unique texts are left out."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, text in enumerate(texts):
        groups[words(text) or (text.strip(),)].append(position)
    return [positions for positions in groups.values() if len(positions) > 1]


def match_same_words(texts: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """Return (index, index of the first of `others` with the same words) for each text that has a match."""
    known: dict[tuple[str, ...], int] = {}
    for position, other in enumerate(others):
        known.setdefault(words(other) or (other.strip(),), position)
    keys = ((position, words(text) or (text.strip(),)) for position, text in enumerate(texts))
    return [(position, known[key]) for position, key in keys if key in known]


def find_near_duplicates(
    texts: Sequence[str], others: Sequence[str] | None = None, *, min_similarity: float = NEAR
) -> list[Pair]:
    """Return pairs of texts with a Jaccard index of shingles >= `min_similarity`, except pairs of equal words.

    others: texts to compare with instead; each text is then paired only with the most similar one. Texts that differ
    only in numbers are not paired: `find_same_except_numbers` counts them. Uses prefix filtering: of n shingles, rarest
    first, two such texts share one of the first n - ceil(min_similarity * n) + 1 (Chaudhuri et al., "A primitive
    operator for similarity joins in data cleaning", ICDE 2006).
    """
    own, theirs = [words(t) for t in texts], [words(t) for t in (texts if others is None else others)]
    own_shingles, their_shingles = [_shingles(w) for w in own], [_shingles(w) for w in theirs]
    counts = Counter(s for shingles in (*own_shingles, *their_shingles) for s in shingles)
    index: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    duplicates: list[Pair] = []
    if others is not None:
        for position, shingles in enumerate(their_shingles):
            _add_to_index(index, position, shingles, counts, min_similarity)
    for position, shingles in enumerate(own_shingles):
        candidates = {other for s in _prefix(shingles, counts, min_similarity) for other in index.get(s, ())}
        pairs = [
            Pair(position, other, similarity)
            for other in sorted(candidates)
            if (similarity := _jaccard(shingles, their_shingles[other])) >= min_similarity
            and own[position] != theirs[other]
            and _without_numbers(own[position]) != _without_numbers(theirs[other])
        ]
        duplicates += pairs if others is None else sorted(pairs, key=lambda pair: -pair.similarity)[:1]
        if others is None:
            _add_to_index(index, position, shingles, counts, min_similarity)
    return duplicates


def find_same_except_numbers(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return indices of texts that equal one of `others` except for the numbers: problems of the same template."""
    known, same = {_without_numbers(words(o)) for o in others}, {words(o) for o in others}
    return [
        position
        for position, text in enumerate(texts)
        if (w := words(text)) not in same
        and any(map(str.isalpha, w))  # otherwise every sum of the same length would match
        and _without_numbers(w) in known
    ]


def _shingles(text: Sequence[str]) -> frozenset[tuple[str, ...]]:
    """Return all runs of `SHINGLE` words; a shorter text is one shingle."""
    if len(text) <= SHINGLE:
        return frozenset([tuple(text)] if text else [])
    return frozenset(tuple(text[i : i + SHINGLE]) for i in range(len(text) - SHINGLE + 1))


def _prefix(
    shingles: Iterable[tuple[str, ...]], counts: Mapping[tuple[str, ...], int], min_similarity: float
) -> list[tuple[str, ...]]:
    """Return the rarest shingles, of which two texts with at least `min_similarity` share at least one."""
    ordered = sorted(shingles, key=lambda s: (counts[s], s))
    shared = math.ceil(min_similarity * len(ordered) - 1e-9)  # 0.55 * 100 is more than 55 in floating point
    return ordered[: len(ordered) - shared + 1] if ordered else []


def _add_to_index(
    index: defaultdict[tuple[str, ...], list[int]],
    position: int,
    shingles: Iterable[tuple[str, ...]],
    counts: Mapping[tuple[str, ...], int],
    min_similarity: float,
) -> None:
    """Add a text to the inverted index under each shingle of its prefix."""
    for shingle in _prefix(shingles, counts, min_similarity):
        index[shingle].append(position)


def _jaccard(a: frozenset[Any], b: frozenset[Any]) -> float:
    """Return the Jaccard index of two sets."""
    common = len(a & b)
    return common / max(len(a) + len(b) - common, 1)


def _without_numbers(text: Sequence[str]) -> tuple[str, ...]:
    """Return the words with every number replaced by "0"."""
    return tuple("0" if _NUMBER.search(word) else word for word in text)


def flag_contaminated(
    train: Sequence[str], bench: Sequence[str], *, ngram: int = 32, skip_empty: bool = False
) -> list[int]:
    """Return 1 for each training prompt that also occurs in the benchmark, else 0 (arXiv 2503.10460, official code).

    A prompt is flagged if it equals a text of `bench`, if both are equal after removing all characters except letters
    and lower-casing, or if they share `ngram` consecutive lower-cased words. Prompts of digits only become the empty
    text, so one such benchmark item flags all of them, as in the official rule; `skip_empty` exempts them.
    """
    exact = set(bench)
    cleaned = {_letters(text) for text in bench} - ({""} if skip_empty else set())
    grams = {gram for text in bench for gram in _ngrams(text, ngram)}
    return [
        int(text in exact or _letters(text) in cleaned or any(gram in grams for gram in _ngrams(text, ngram)))
        for text in train
    ]


def _letters(text: str) -> str:
    """Return the lower-cased text without digits, white space and punctuation."""
    return re.sub(r"\d", "", re.sub(r"\W", "", text)).lower()


def _ngrams(text: str, size: int) -> list[tuple[str, ...]]:
    """Return all n-grams of `size` lower-cased words."""
    words = text.lower().split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
