"""Thinking in chunks that carry a part of the text over (Delethink, arXiv 2510.06557). Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence


def next_prompt(query: Sequence[int], answer: Sequence[int], keep_head: int, keep_tail: int) -> list[int]:
    """The prompt of the chunk after this answer so far: the query, its first keep_head and its last keep_tail tokens.

    An answer that is not longer than both is kept whole. keep_tail must be above 0.
    """
    if keep_tail < 1:
        raise ValueError("keep_tail must be at least 1")
    if len(answer) <= keep_head + keep_tail:
        return [*query, *answer]
    return [*query, *answer[:keep_head], *answer[len(answer) - keep_tail :]]


def chunk_prompts(
    query: Sequence[int], chunks: Sequence[Sequence[int]], *, keep_head: int, keep_tail: int
) -> list[list[int]]:
    """The prompt behind each chunk: the answer so far is what was carried over, then what the chunk added."""
    found: list[list[int]] = []
    carried: list[int] = []
    for chunk in chunks:
        found.append(next_prompt(query, [*carried, *chunk], keep_head, keep_tail))
        carried = found[-1][len(query) :]
    return found
