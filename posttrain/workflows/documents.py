"""Keyword search in the documents of a data row."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence

from posttrain.workflows.protocol import Call, Caller, last_between

_WORD = re.compile(r"\w+")


async def search_documents(
    call: Caller, asking: Call, texts: Sequence[str], most: int, count: int, *, until: str = "answer"
) -> list[str]:
    """Reply to each <search> of a call with the matching passages, until the call writes no <search>, writes <`until`>,
    or has made `most` searches. Returns the queries."""
    queries: list[str] = []
    while len(queries) < most:
        query = last_between(asking.parts[-1], "search")
        if query is None or last_between(asking.parts[-1], until) is not None:
            break
        queries.append(query)
        found = find_passages(query, texts, count)
        await call.reply(asking, "\n".join(f"[{n}] {text}" for n, text in enumerate(found, 1)) or "nothing found")
    return queries


def find_passages(query: str, texts: Sequence[str], count: int) -> list[str]:
    """Return at most `count` texts that share words with a query, the most similar first."""
    return [texts[n] for n in rank_passages(query, texts)[:count]]


def rank_passages(query: str, texts: Sequence[str]) -> list[int]:
    """Return the indices of the texts that share words with a query, by the sum of log(1 + N / document frequency) over
    the shared words; ties in their order."""
    words = [split_words(text) for text in texts]
    asked = split_words(query)
    frequency = Counter(word for text_words in words for word in asked & text_words)
    scores = [
        math.fsum(math.log(1 + len(texts) / frequency[word]) for word in sorted(asked & text_words))
        for text_words in words
    ]
    return sorted((n for n, score in enumerate(scores) if score > 0), key=lambda n: (-scores[n], n))


@functools.lru_cache(maxsize=65_536)
def split_words(text: str) -> frozenset[str]:
    """Return the set of lowercase words of a text."""
    return frozenset(_WORD.findall(text.lower()))
