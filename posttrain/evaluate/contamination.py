"""Contamination check: a model that continues the first part of benchmark problems verbatim has seen them in training.

Pure functions of text (Reasoning or Memorization?, arXiv 2507.10532); the comparison of words is not the paper's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.evaluate.estimators import mean

Unit = Literal["word", "char"]

_WORD_PATTERN = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Contamination:
    """One value for each text that has a hidden part, and their means (None if no text has one)."""

    exact: list[float]
    rouge_l: list[float]
    completion_rate: float | None
    mean_rouge_l: float | None


def split_text(text: str, ratio: float, unit: Unit = "word") -> tuple[str, str]:
    """Split a text after the first int(ratio * n) of its n words (at least 1) and return both parts unchanged.

    unit `char`: letters and digits of any script instead of words, for languages that write no blanks.
    """
    units = list(re.finditer(r"\S+" if unit == "word" else r"\S", text))
    count = max(1, int(ratio * len(units)))
    end = units[count - 1].end() if count <= len(units) and units else len(text)
    return text[:end], text[end:]


def contamination_check(
    texts: Sequence[str], continuations: Sequence[str], *, ratio: float = 0.6, unit: Unit = "word"
) -> Contamination:
    """Compare the hidden part of each text with the model's continuation of the shown part.

    Words are compared as lower-cased runs of a-z and 0-9. exact: the continuation begins with all hidden words.
    rouge_l: 2 LCS / (hidden + cut), with the continuation cut to the number of hidden words. Texts without a hidden
    part are skipped.
    """
    exact, rouge = [], []
    for text, continuation in zip(texts, continuations, strict=True):
        hidden = split_units(split_text(text, ratio, unit)[1], unit)
        if hidden:
            cut = split_units(continuation, unit)[: len(hidden)]
            exact.append(float(cut == hidden))
            rouge.append(rouge_l(hidden, cut))
    return Contamination(exact, rouge, mean(exact), mean(rouge))


@dataclass(frozen=True)
class ContaminationProbe:
    """Result for one question: the number of words shown, and the match of the continuation with the hidden part."""

    shown_words: int
    rouge_l: float | None
    exact_match: float | None


def probe_question(question: str, continuation: str, *, fraction: float = 0.6) -> ContaminationProbe:
    """Compare one question as the paper does: words between blanks unchanged, floor(fraction * words) shown.

    The scores are None if nothing is hidden.
    """
    words = question.split()
    shown = int(fraction * len(words))
    hidden = words[shown:]
    if not hidden:
        return ContaminationProbe(shown, None, None)
    cut = continuation.split()[: len(hidden)]
    return ContaminationProbe(shown, rouge_l(hidden, cut), float(cut == hidden))


def split_units(text: str, unit: Unit) -> list[str]:
    """Split a text into the units that are compared: words, or letters and digits."""
    if unit == "char":
        return [letter for letter in text.lower() if letter.isalnum()]
    return _WORD_PATTERN.findall(text.lower())


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """Compute ROUGE-L F1: 2 LCS / (len(a) + len(b)); 0 for an empty side."""
    return 2 * lcs_length(a, b) / (len(a) + len(b)) if a and b else 0.0


def lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Compute the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
