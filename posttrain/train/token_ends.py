"""Character positions in a completion's text at which its tokens end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

MAX_CACHED = 1 << 20  # tokens and token pairs whose length is cached


def token_ends(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return the character of a completion's text at which each token ends.

    Computed from what a token adds to the previous one, not from the token alone: some tokenizers drop the leading
    space of a single token, and a character may consist of two tokens. A character of more tokens (rare scripts, emoji)
    may shift the ends after it by a character or two.
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
        if len(known) > MAX_CACHED:
            known.clear()
        known.update(found)
        lengths = [found[row] if length is None else length for row, length in zip(rows, lengths, strict=True)]
    alone, pairs = lengths[: len(ids)], lengths[len(ids) :]
    added = [*alone[:1], *(both - first for both, first in zip(pairs, alone, strict=False))]
    return list(itertools.accumulate(added))


@functools.lru_cache(maxsize=1)
def _lengths(tokenizer: Any) -> dict[tuple[int, ...], int]:
    """Return the cache of the text lengths of single tokens and of pairs: most pairs of a text were seen before."""
    del tokenizer
    return {}
