"""Where each token of a completion ends in its text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

KNOWN = 1 << 20  # pairs of tokens whose length is kept


def token_ends(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """The character of a completion's text at which each token ends: what a token adds to the one before it.

    Not the token alone: some tokenizers drop a leading blank there, and a character may be made of two tokens. One made
    of more (rare scripts, emoji) may move the ends after it by a character or two.
    """
    rows: list[tuple[int, ...]] = [*zip(ids, strict=True), *itertools.pairwise(ids)]
    known = _lengths(tokenizer)
    lengths: list[Any] = list(map(known.get, rows))
    if None in lengths:
        new = list(dict.fromkeys(row for row, length in zip(rows, lengths, strict=True) if length is None))
        texts = tokenizer.batch_decode(
            list(map(list, new)), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found = dict(zip(new, map(len, texts), strict=True))
        if len(known) > KNOWN:
            known.clear()
        known.update(found)
        lengths = [found[row] if length is None else length for row, length in zip(rows, lengths, strict=True)]
    alone, pairs = lengths[: len(ids)], lengths[len(ids) :]
    added = [*alone[:1], *(both - first for both, first in zip(pairs, alone, strict=False))]
    return list(itertools.accumulate(added))


@functools.lru_cache(maxsize=1)
def _lengths(tokenizer: Any) -> dict[tuple[int, ...], int]:
    """Characters of single tokens and of pairs, as far as they were asked for: a text has few that are new."""
    del tokenizer
    return {}
