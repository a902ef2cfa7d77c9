"""How many characters differ: edit distance, and what scores of text recognition make of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements of characters that make `a` to `b` (Levenshtein).

    Bit-parallel (Hyyrö 2003): a column of the table is two numbers whose bits say where it rises and falls, so a
    character of `b` costs a few operations on numbers of len(a) bits.
    """
    if not a or not b:
        return len(a) or len(b)
    places: dict[str, int] = {}
    for place, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << place
    every, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    rises, falls, distance = every, 0, len(a)  # of the column, from a character of `a` to the next
    for character in b:
        equal = places.get(character, 0)
        diagonal = ((((equal & rises) + rises) ^ rises) | equal | falls) & every
        row_rises = falls | (every & ~(diagonal | rises))
        row_falls = rises & diagonal
        distance += bool(row_rises & last) - bool(row_falls & last)
        row_rises = row_rises << 1 | 1
        vertical = equal | falls
        rises = (row_falls << 1 | (every & ~(vertical | row_rises))) & every
        falls = row_rises & vertical & every
    return distance


def similarity(a: str, b: str) -> float:
    """1 - edit distance / the length of the longer text, in [0, 1]; 1 for two empty ones."""
    return 1 - edit_distance(a, b) / max(len(a), len(b)) if a or b else 1.0


def anls(text: str, golds: Sequence[str], *, threshold: float = 0.5) -> float:
    """Average normalised Levenshtein similarity of one answer: the best over the golds, 0 below `threshold`.

    Letters of both cases are equal and blanks count once (ST-VQA, 1907.00490). In [0, 1]; 0 without golds.
    """
    read = _flat(text)
    best = max((similarity(read, _flat(gold)) for gold in golds), default=0.0)
    return best if best >= threshold else 0.0


def _flat(text: str) -> str:
    return " ".join(text.split()).casefold()
