"""Was a benchmark seen in training? A model that continues the first part of its problems word by word has seen them.

Pure functions of text (Reasoning or Memorization?, arXiv 2507.10532); how words are compared is ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.evaluate.estimators import mean

Unit = Literal["word", "char"]

_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Contamination:
    """One value a text that has a hidden part, and their means (None if no text has one)."""

    exact: list[float]
    rouge_l: list[float]
    completion_rate: float | None
    mean_rouge_l: float | None


def shown_and_hidden(text: str, ratio: float, unit: Unit = "word") -> tuple[str, str]:
    """The first int(ratio * n) of n words (at least 1), as they stand in the text, and the rest.

    unit `char`: letters and digits of any script instead of words, for languages that write no blanks.
    """
    pieces = list(re.finditer(r"\S+" if unit == "word" else r"\S", text))
    count = max(1, int(ratio * len(pieces)))
    end = pieces[count - 1].end() if count <= len(pieces) and pieces else len(text)
    return text[:end], text[end:]


def contamination_check(
    texts: Sequence[str], continuations: Sequence[str], *, ratio: float = 0.6, unit: Unit = "word"
) -> Contamination:
    """Compare the hidden part of each text with what the model wrote after the part that it was shown.

    Words are compared as lower-cased runs of a-z and 0-9. exact: the continuation begins with all hidden words.
    rouge_l: 2 LCS / (hidden + cut), the continuation cut to as many words as are hidden. Texts without a hidden part
    are left out.
    """
    exact, rouge = [], []
    for text, continuation in zip(texts, continuations, strict=True):
        hidden = comparison_units(shown_and_hidden(text, ratio, unit)[1], unit)
        if hidden:
            cut = comparison_units(continuation, unit)[: len(hidden)]
            exact.append(float(cut == hidden))
            rouge.append(overlap(hidden, cut))
    return Contamination(exact, rouge, mean(exact), mean(rouge))


@dataclass(frozen=True)
class ContaminationProbe:
    """One question's probe: how many words were shown, and how the continuation fits the rest."""

    shown_words: int
    rouge_l: float | None
    exact_match: float | None


def probe(question: str, continuation: str, *, fraction: float = 0.6) -> ContaminationProbe:
    """The probe as the paper describes it: words between blanks as they are, floor(fraction * words) shown.

    None where nothing is hidden.
    """
    words = question.split()
    shown = int(fraction * len(words))
    hidden = words[shown:]
    if not hidden:
        return ContaminationProbe(shown, None, None)
    cut = continuation.split()[: len(hidden)]
    return ContaminationProbe(shown, overlap(hidden, cut), float(cut == hidden))


def comparison_units(text: str, unit: Unit) -> list[str]:
    """What is compared of a text."""
    if unit == "char":
        return [letter for letter in text.lower() if letter.isalnum()]
    return _WORD.findall(text.lower())


def overlap(a: Sequence[str], b: Sequence[str]) -> float:
    """ROUGE-L F1: 2 LCS / (len(a) + len(b)); 0 for an empty side."""
    return 2 * common_subsequence(a, b) / (len(a) + len(b)) if a and b else 0.0


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
