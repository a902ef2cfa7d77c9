"""Which training prompts a benchmark also has: the rules of Light-R1."""

from __future__ import annotations

import re
from collections.abc import Sequence


def flag_contaminated(
    train: Sequence[str], bench: Sequence[str], *, ngram: int = 32, skip_empty: bool = False
) -> list[int]:
    """1 for each prompt that a benchmark has too, else 0 (arXiv 2503.10460, official code).

    A prompt is taken if it equals one of `bench`, also after both lose every character that is no letter and their
    case, or if they share `ngram` words in a row, lower-cased. Prompts of digits alone become the empty text, so that
    one such benchmark item flags all of them, as in the official rule; `skip_empty` exempts them.
    """
    exact = set(bench)
    cleaned = {_letters(text) for text in bench} - ({""} if skip_empty else set())
    grams = {gram for text in bench for gram in _ngrams(text, ngram)}
    return [
        int(text in exact or _letters(text) in cleaned or any(gram in grams for gram in _ngrams(text, ngram)))
        for text in train
    ]


def _letters(text: str) -> str:
    return re.sub(r"\d", "", re.sub(r"\W", "", text)).lower()


def _ngrams(text: str, size: int) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
