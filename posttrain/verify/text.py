"""Comparison of short answers in words, and blocks of a tagged completion. Pure functions of text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Metric = Literal["em", "subem", "f1"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_GOLD = re.compile(r"\s*(?:nan|none|null)?\s*", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_QUESTIONS = ("yes", "no", "noanswer")


def qa_norm(text: str) -> str:
    """Lowercase, remove ASCII punctuation, remove the words a, an and the, collapse blanks (in this order)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def golds_of(answer: Any) -> list[str]:
    """Return the gold answers of a row as texts: each entry of a list, or the single value.

    Blank texts, null and NaN, also as text, are dropped. Raises ValueError for a dict, whose text is not an answer.
    """
    listed = answer if isinstance(answer, list | tuple) else [answer]
    if held := next((gold for gold in listed if isinstance(gold, Mapping)), None):
        raise ValueError(f"the gold is a dict with {', '.join(map(str, held))}; it must be a text or a list of texts")
    return [str(gold) for gold in listed if gold is not None and not _NO_GOLD.fullmatch(str(gold))]


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Return 1 if the prediction equals a gold answer after `qa_norm`, else 0: SQuAD's rule, for words.

    Punctuation is ignored, so `-5` equals `5` and `3.5` equals `35`: use the math verifier for numbers.

    A gold answer that normalizes to nothing ("A", "+") is compared as written; otherwise an empty answer would equal
    it.
    """
    found = qa_norm(prediction)
    return float(any(found == kept if (kept := qa_norm(gold)) else _same_text(prediction, gold) for gold in golds))


def _same_text(a: str, b: str) -> bool:
    return a.strip().lower() == b.strip().lower()


def contains(text: str, golds: Sequence[str]) -> bool:
    """Return whether a gold answer occurs in the text, both after `qa_norm`; an empty one never does."""
    within = qa_norm(text)
    return any(gold in within for gold in map(qa_norm, golds) if gold)


def word_f1(prediction: str, golds: Sequence[str]) -> float:
    """Compute the F1 of the bags of words after `qa_norm`, the maximum over the gold answers.

    The F1 is 0 if the gold answer or the prediction is just yes, no or noanswer and the two differ.
    """
    return max((_f1(qa_norm(prediction), qa_norm(gold)) for gold in golds), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _CLOSED_QUESTIONS or gold in _CLOSED_QUESTIONS):
        return 0.0
    predicted, wanted = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def match(prediction: str, golds: Sequence[str], metric: Metric) -> float:
    """Score an answer by exact match, by containment of a gold answer, or by word F1.

    Raises ValueError for an unknown metric.
    """
    if metric == "em":
        return exact_match(prediction, golds)
    if metric == "subem":
        return float(contains(prediction, golds))
    if metric == "f1":
        return word_f1(prediction, golds)
    raise ValueError(f"unknown metric {metric!r}; known: em, subem, f1")


def exact_blocks(text: str, tags: Sequence[str]) -> list[str] | None:
    """Return the block contents if the text consists of exactly these blocks, in order and none blank; else None.

    Only blanks may stand between and around the blocks, and no further opening or closing tags of these names may
    occur.
    """
    stripped = text.strip()
    counts = Counter(tags)
    if any(stripped.count(mark) != n for tag, n in counts.items() for mark in (f"<{tag}>", f"</{tag}>")):
        return None
    contents, position = [], 0
    for tag in tags:
        opening = f"<{tag}>"
        start = stripped.find(opening, position)
        if start < 0 or stripped[position:start].strip():
            return None
        position = stripped.find(f"</{tag}>", start)
        if position < 0 or not (content := stripped[start + len(opening) : position]).strip():
            return None
        contents.append(content)
        position += len(opening) + 1
    return contents if position == len(stripped) else None


def split_at_tags(text: str, tags: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Split the text at opening and closing tags; yield (tag or text between tags, is it a tag)."""
    for number, piece in enumerate(re.split(rf"(</?(?:{'|'.join(tags)})>)", text)):
        yield piece, number % 2 == 1


def overlap(a: set[Any], b: set[Any]) -> float:
    """Return the Jaccard overlap: common members / all members; 1 if both sets are empty."""
    return len(a & b) / len(a | b) if a | b else 1.0


def weighted_mean(parts: Mapping[str, float], weights: Mapping[str, float] | None, known: Sequence[str]) -> float:
    """Return the mean of the parts by `weights` (default 1 for an unlisted part); 0 if all weights are 0.

    Raises ValueError for a weight whose name is not in `known`.
    """
    given = dict(weights or {})
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"weights of unknown parts: {', '.join(unknown)}; known: {', '.join(known)}")
    total = sum(given.get(name, 1.0) for name in parts)
    return sum(given.get(name, 1.0) * value for name, value in parts.items()) / total if total else 0.0
