"""Efficiency rewards: length budgets, repetition, thinking modes and redundant thoughts. Pure functions, no torch."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Hashable, Sequence

from posttrain.registry import load_function
from posttrain.thoughts import end_in

TURNS = ("Wait", "But", "Alternatively", "Hmm", "Let", "Therefore")  # words that begin a new line of thought (DECS)


def half_cosine(start: float, end: float, share: float) -> float:
    """Interpolate from start (share 0) to end (share 1) along half a cosine."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * share))


def exact_budget(correct: float, length: float, target: float, *, alpha: float = 0.0003) -> float:
    """Compute correct - alpha * |target - length|."""
    return correct - alpha * abs(target - length)


def max_budget(correct: float, length: float, target: float, *, alpha: float = 0.0003, delta: float = 0.5) -> float:
    """Compute correct * (alpha * (target - length) + delta), with the parenthesis clipped to [0, 1]."""
    return correct * min(max(alpha * (target - length) + delta, 0.0), 1.0)


def repetition(items: Sequence[Hashable], ngram_size: int, max_penalty: float) -> float:
    """Compute max_penalty * (1 - distinct n-grams / all n-grams); 0 without n-grams.

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
    """Compute `repetition` of the token ids as in TRL or, without token ids, of the lowercased words as in open-r1."""
    items: Sequence[Hashable] = (completion or "").lower().split() if tokens is None else tokens
    return repetition(items, n, max_penalty)


def first_mode(text: str, markers: Sequence[str]) -> int:
    """Return the index of the longest marker that the text starts with (after blanks); -1 if there is none."""
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
    """Return the reward by mode (0 short, 1 think, else none) and correctness; None if that is unknown."""
    if mode not in (0, 1):
        return missing_mode
    if correct is None:
        return None
    right, wrong = ((correct_short, wrong_short), (correct_think, wrong_think))[int(mode)]
    return right if correct >= 1 else wrong


def inverse_calls(correct: float | None, calls: float) -> float | None:
    """Return 1 / (calls + 1) for a right answer, 0 for a wrong one; None if correctness is unknown."""
    if correct is None:
        return None
    return 1.0 / (calls + 1) if correct >= 1 else 0.0


def segment_penalty(lengths: Sequence[float], scores: Sequence[float], *, max_score: float = 5) -> float:
    """Compute the length-weighted mean of (max_score - score) / (max_score - 1); 0 without segments."""
    total = sum(lengths)
    if total <= 0:
        return 0.0
    lost = sum(n * (max_score - score) / (max_score - 1) for n, score in zip(lengths, scores, strict=True))
    return lost / total


def segment_reward(
    correct: float, lengths: Sequence[float], scores: Sequence[float], *, weight: float = 0.2, max_score: float = 5
) -> float:
    """Compute correct * (1 - weight * segment_penalty)."""
    return correct * (1 - weight * segment_penalty(lengths, scores, max_score=max_score))


def scored_segments(completion: str, scorer: str) -> tuple[list[int], list[float]]:
    """Split a completion with the function `scorer` (`file.py:function`); return lengths (characters) and scores.

    Returns empty lists for an empty `scorer`, or if the joined segments differ from the completion.
    """
    segments = load_function(scorer, None, what="scorer")(completion) if scorer else []
    if "".join(text for text, _ in segments) != completion:
        return [], []
    return [len(text) for text, _ in segments], [score for _, score in segments]


def chunks(thought: str, words: Sequence[str] = TURNS) -> list[str]:
    """Split the thought before each of the words (and the blank before it); merge one-line chunks with the next."""
    cut = re.split(rf"(?=(?<!\w)(?:{'|'.join(map(re.escape, words))})\b)", thought)
    merged, waiting = [], ""
    for piece in filter(None, cut):
        waiting += piece
        if "\n" in waiting.strip():
            merged.append(waiting)
            waiting = ""
    return [*merged, waiting] if waiting else merged


def mentions(text: str, answer: str) -> bool:
    """Return whether the answer occurs in the text as a whole word or number.

    Blanks, `$`, commas and case are ignored.
    """
    plain = re.compile(r"[\s$,]+")
    wanted = plain.sub(" ", answer).strip().lower()
    if not wanted:
        return False
    return re.search(rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)", plain.sub(" ", text).lower()) is not None


def necessary_prefix(
    completion: str, answer: str, *, words: Sequence[str] = TURNS, think_end: str = "</think>"
) -> tuple[int, int, float]:
    """Return (start, end, share): the redundant part of the thought, in characters, and the share of necessary chunks.

    The necessary prefix ends with the first chunk that mentions the answer; without such a chunk or a finished thought,
    nothing is redundant: (-1, end, 1.0).
    """
    end = completion.find(end_in(completion, think_end))
    pieces = chunks(completion[: max(end, 0)], words)
    found = next((number for number, piece in enumerate(pieces) if mentions(piece, answer)), None)
    if found is None:
        return -1, end, 1.0
    start = sum(len(piece) for piece in pieces[: found + 1])
    return start, end, (found + 1) / len(pieces)


def token_position(character: int, token_ends: Sequence[int]) -> int:
    """Return the number of tokens that end at or before a character offset; -1 stays -1.

    token_ends: end offset of each token.
    """
    return -1 if character < 0 else bisect_right(token_ends, character)
