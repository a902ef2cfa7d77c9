"""BLEU against references, smoothed as in `evaluate`, and selection of hard prompts by BLEU. Pure functions.

sacrebleu is not used: its smoothing does not apply to unigrams, so that an answer without a common word gets 0 instead
of 0.23, and it adds five packages for about thirty lines of code.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from posttrain.verify.extract import outside_thoughts
from posttrain.verify.text import golds_of

MAX_ORDER = 4
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_SPLITS = (  # mteval-13a: split off ASCII punctuation, except . and , between digits, and - not after a digit
    (re.compile(r"([{-~\[-`!-&(-+:-@/])"), r" \1 "),
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def tokens_13a(text: str) -> list[str]:
    """Tokenize a text with the 13a scheme of machine translation; case is kept."""
    line = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in _ENTITIES:
        line = line.replace(entity, character)
    line = f" {line} "
    for pattern, replacement in _SPLITS:
        line = pattern.sub(replacement, line)
    return line.split()


def bleu(prediction: str, references: Sequence[str]) -> float:
    """Compute smoothed BLEU up to 4-grams, in [0, 1]; 0 for a blank prediction.

    p_n = (matches + 1) / (n-grams + 1), with matches clipped to the largest count in any reference, times exp(1 - r /
    c) if the prediction (c tokens) is not longer than the shortest reference (r). Five words without a match still
    score 0.23: watch for collapsing lengths.
    """
    predicted, wanted = tokens_13a(prediction), [tokens_13a(reference) for reference in references]
    if not predicted:
        return 0.0
    logs = []
    for n in range(1, MAX_ORDER + 1):
        most: Counter[tuple[str, ...]] = Counter()
        for reference in wanted:
            most |= _ngrams(reference, n)
        own = _ngrams(predicted, n)
        matches = sum(min(own[gram], count) for gram, count in most.items() if gram in own)
        logs.append(math.log((matches + 1) / (max(len(predicted) - n + 1, 0) + 1)))
    shortest = min(map(len, wanted))
    brevity = 0.0 if len(predicted) > shortest else 1 - shortest / len(predicted)
    return math.exp(sum(logs) / MAX_ORDER + brevity)


def _ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False))


def open_answer(completion: str) -> str:
    """Return the text between the first `<answer>` and the next `</answer>` or the end; the whole text without the tag.

    Closed thoughts are removed first.
    """
    text = outside_thoughts(completion)
    _, tag, rest = text.partition("<answer>")
    return rest.partition("</answer>")[0] if tag else text


def reference_bleu(completion: str, answer: Sequence[str] | str | None) -> float | None:
    """Compute the BLEU of the answer against its references; None without a non-blank reference (BLEUBERI).

    Raises ValueError for a dict.
    """
    references = golds_of(answer)
    return bleu(open_answer(completion), references) if references else None


def choose(
    scores: Sequence[float],
    k: int,
    *,
    mode: Literal["hard", "easy", "random"] = "hard",
    seed_order: Sequence[int] | None = None,
) -> list[int]:
    """Choose k prompts by the score of the base model's answers (BLEUBERI); return their indices, ascending.

    hard: lowest scores; easy: highest scores; random: the first k of `seed_order`, a permutation drawn by the caller.
    Ties go to the earlier prompt; k above the number of prompts returns all. Raises ValueError for an unknown mode, and
    for `random` without seed_order.
    """
    if mode == "random":
        if seed_order is None:
            raise ValueError("mode random needs seed_order")
        order = list(seed_order)
    elif mode in ("hard", "easy"):
        sign = 1 if mode == "hard" else -1
        order = sorted(range(len(scores)), key=lambda i: (sign * scores[i], i))
    else:
        raise ValueError(f"unknown mode {mode!r}; known: hard, easy, random")
    return sorted(order[: max(0, k)])
