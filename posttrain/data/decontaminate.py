"""Detection of training prompts that also occur in a benchmark, by the rules of Light-R1."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
