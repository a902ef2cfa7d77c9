"""How much a right answer cost: budgets, repetition, modes of thinking and redundant thoughts. Pure, no torch."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Hashable, Sequence

from posttrain.registry import load_function

TURNS = ("Wait", "But", "Alternatively", "Hmm", "Let", "Therefore")  # words at which a thought starts anew (DECS)


def half_cosine(start: float, end: float, share: float) -> float:
    """From start at share 0 along half a cosine to end at share 1."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * share))


def exact_budget(correct: float, length: float, target: float, *, alpha: float = 0.0003) -> float:
    """correct - alpha * |target - length|."""
    return correct - alpha * abs(target - length)


def max_budget(correct: float, length: float, target: float, *, alpha: float = 0.0003, delta: float = 0.5) -> float:
    """correct * (alpha * (target - length) + delta), the bracket limited to [0, 1]."""
    return correct * min(max(alpha * (target - length) + delta, 0.0), 1.0)


def repetition(items: Sequence[Hashable], ngram_size: int, max_penalty: float) -> float:
    """max_penalty * (1 - distinct n-grams / all n-grams), 0 if there is none; a positive penalty is a ValueError.

    Raises ValueError for a positive max_penalty or an ngram_size below 1.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty {max_penalty} would reward repetition")
    if ngram_size < 1:
        raise ValueError(f"ngram_size {ngram_size} is not positive")
    total = len(items) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(items[i : i + ngram_size]) for i in range(total)})
    return (1 - distinct / total) * max_penalty if distinct < total else 0.0


def repetition_penalty(
    completion: str | None = None, tokens: Sequence[int] | None = None, *, n: int = 3, max_penalty: float = -1.0
) -> float:
    """`repetition` of the token ids as TRL has it, without them of the lower-cased words as open-r1 has it."""
    items: Sequence[Hashable] = (completion or "").lower().split() if tokens is None else tokens
    return repetition(items, n, max_penalty)


def first_mode(text: str, markers: Sequence[str]) -> int:
    """Index of the marker that the text starts with (after blanks), the longest if several fit; -1 if none does."""
    start = text.lstrip()
    fitting = [index for index, marker in enumerate(markers) if start.startswith(marker)]
    return max(fitting, key=lambda index: len(markers[index]), default=-1)


def mode_reward(
    mode: float | None,
    correct: float | None,
    *,
    correct_short: float = 1.0,
    correct_think: float = 0.5,
    wrong_short: float = -1.0,
    wrong_think: float = -1.0,
    missing_mode: float = -1.0,
) -> float | None:
    """What an answer earns by mode (0 short, 1 think, anything else none) and correctness; None if that is unknown."""
    if mode not in (0, 1):
        return missing_mode
    if correct is None:
        return None
    right, wrong = ((correct_short, wrong_short), (correct_think, wrong_think))[int(mode)]
    return right if correct >= 1 else wrong


def inverse_calls(correct: float | None, calls: float) -> float | None:
    """1 / (calls + 1) for a right answer, 0 for a wrong one; None if that is unknown."""
    if correct is None:
        return None
    return 1.0 / (calls + 1) if correct >= 1 else 0.0


def segment_penalty(lengths: Sequence[float], scores: Sequence[float], *, max_score: float = 5) -> float:
    """Mean of (max_score - score) / (max_score - 1) by length; 0 if all segments are essential, or there is none."""
    total = sum(lengths)
    if total <= 0:
        return 0.0
    lost = sum(n * (max_score - score) / (max_score - 1) for n, score in zip(lengths, scores, strict=True))
    return lost / total


def segment_reward(
    correct: float, lengths: Sequence[float], scores: Sequence[float], *, weight: float = 0.2, max_score: float = 5
) -> float:
    """correct * (1 - weight * segment_penalty)."""
    return correct * (1 - weight * segment_penalty(lengths, scores, max_score=max_score))


def scored_segments(completion: str, scorer: str) -> tuple[list[int], list[float]]:
    """Lengths in characters and scores of what the function `scorer` (`file.py:function`) makes of a completion.

    Nothing for an empty `scorer`, or if its segments put together are not the completion.
    """
    segments = load_function(scorer, None, what="scorer")(completion) if scorer else []
    if "".join(text for text, _ in segments) != completion:
        return [], []
    return [len(text) for text, _ in segments], [score for _, score in segments]


def chunks(thought: str, words: Sequence[str] = TURNS) -> list[str]:
    """The thought cut before each of the words (with the blank before it); a chunk of a single line joins the next."""
    cut = re.split(rf"(?=(?<!\w)(?:{'|'.join(map(re.escape, words))})\b)", thought)
    merged, waiting = [], ""
    for piece in filter(None, cut):
        waiting += piece
        if "\n" in waiting.strip():
            merged.append(waiting)
            waiting = ""
    return [*merged, waiting] if waiting else merged


def mentions(text: str, answer: str) -> bool:
    """The answer stands in the text, not as a part of a longer word or number; blanks, `$`, commas and case do not
    count."""
    plain = re.compile(r"[\s$,]+")
    wanted = plain.sub(" ", answer).strip().lower()
    if not wanted:
        return False
    return re.search(rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)", plain.sub(" ", text).lower()) is not None


def necessary_prefix(
    completion: str, answer: str, *, words: Sequence[str] = TURNS, think_end: str = "</think>"
) -> tuple[int, int, float]:
    """Where the redundant part of the thought starts and ends, in characters, and the necessary chunks' share of all.

    The necessary prefix ends with the first chunk that mentions the answer; without one, or without a finished thought,
    nothing is redundant: (-1, end, 1.0).
    """
    end = completion.find(think_end)
    pieces = chunks(completion[: max(end, 0)], words)
    found = next((number for number, piece in enumerate(pieces) if mentions(piece, answer)), None)
    if found is None:
        return -1, end, 1.0
    start = sum(len(piece) for piece in pieces[: found + 1])
    return start, end, (found + 1) / len(pieces)


def token_position(character: int, token_ends: Sequence[int]) -> int:
    """Number of tokens that end at or before a character position; -1 stays -1. token_ends: where each token ends."""
    return -1 if character < 0 else bisect_right(token_ends, character)
