"""Edit distance, and text recognition scores based on it. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence


def edit_distance(a: str, b: str) -> int:
    """Return the minimum number of character insertions, deletions and replacements from `a` to `b` (Levenshtein).

    Bit-parallel (Hyyrö 2003): two integers encode where a column of the table rises and falls, so a character of `b`
    costs a few operations on integers of len(a) bits.
    """
    if not a or not b:
        return len(a) or len(b)
    bits_of: dict[str, int] = {}
    for position, character in enumerate(a):
        bits_of[character] = bits_of.get(character, 0) | 1 << position
    every, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    rises, falls, distance = every, 0, len(a)  # of the column, from one character of `a` to the next
    for character in b:
        equal = bits_of.get(character, 0)
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
    """Compute 1 - edit distance / length of the longer text, in [0, 1]; 1 for two empty texts."""
    return 1 - edit_distance(a, b) / max(len(a), len(b)) if a or b else 1.0


def anls(text: str, golds: Sequence[str], *, threshold: float = 0.5) -> float:
    """Compute the normalized Levenshtein similarity (ANLS), the maximum over gold answers, 0 below `threshold`.

    Case is ignored and runs of blanks count as one (ST-VQA, 1907.00490). In [0, 1]; 0 without gold answers.
    """
    read = _flat(text)
    best = max((similarity(read, _flat(gold)) for gold in golds), default=0.0)
    return best if best >= threshold else 0.0


def _flat(text: str) -> str:
    return " ".join(text.split()).casefold()
