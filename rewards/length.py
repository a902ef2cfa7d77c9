r"""Rewards for length, in completion tokens.

rewards:
  - use: length.soft_overlong                # added to accuracy: 0 up to max_length - buffer, then down to -factor
    params: {max_length: 512, buffer: 128}
  - use: length.truncation                   # instead of accuracy (give accuracy weight 0): right and short enough
    params: {max_length: 512}
  - use: length.cosine                       # instead of accuracy: short right answers pay most
    params: {max_length: 512}
  - use: length.ngram_repetition             # added to accuracy: a penalty for loops
    params: {ngram_size: 20, max_penalty: -0.5}
  - use: length.l1_exact                     # instead of accuracy: think for `target` tokens, a column of the data
"""

from collections.abc import Sequence
from typing import Literal

from posttrain.verify import efficiency


def soft_overlong(
    completion: str, token_count: int, *, max_length: int, buffer: int, factor: float = 1.0, unbounded: bool = False
) -> float:
    """0 up to max_length - buffer tokens, then linear down to -factor at max_length, -factor beyond.

    DAPO (2503.14476, eq. 13; the paper has max_length 20480, buffer 4096). A completion cut at max_length gets -factor:
    use this or `loss.mask_truncated`, not both. buffer 0: a step at max_length. unbounded: falls on beyond max_length,
    as in AdaCtrl's code.
    """
    over = token_count - (max_length - buffer)
    if over <= 0:
        return 0.0
    if buffer == 0 or (token_count > max_length and not unbounded):
        return -float(factor)
    return -factor * over / buffer


def truncation(
    completion: str, token_count: int, correct: bool | None, truncated: bool = False, *, max_length: int
) -> float | None:
    """1 if the answer is right and at most max_length tokens long, else 0; None if nobody knows whether it is right.

    DLER (2510.15110): the simplest length penalty. `rollout.max_new_tokens: max_length` saves the tokens beyond.
    """
    if correct is None:
        return None
    return float(bool(correct) and token_count <= max_length and not truncated)


def cosine(
    completion: str,
    token_count: int,
    correct: bool | None,
    truncated: bool | None = False,
    *,
    max_length: int,
    min_value_correct: float = 1.0,
    max_value_correct: float = 2.0,
    min_value_wrong: float = -10.0,
    max_value_wrong: float = 0.0,
    exceed_reward: float = -10.0,
    margin: int = 16,
) -> float | None:
    """Right: max_value_correct at length 0 falling to min_value_correct at max_length. Wrong: min_value_wrong rising to
    max_value_wrong. Cut, or within `margin` tokens of max_length: exceed_reward. None if correctness is unknown.

    2502.03373 with its values. Half a cosine over the length: k = (1 + cos(pi * L / max_length)) / 2.
    """
    if truncated or token_count + margin >= max_length:
        return float(exceed_reward)
    if correct is None:
        return None
    if correct:
        return efficiency.half_cosine(max_value_correct, min_value_correct, token_count / max_length)
    return efficiency.half_cosine(min_value_wrong, max_value_wrong, token_count / max_length)


def open_rs(
    completion: str,
    token_count: int,
    correct: bool | None,
    *,
    max_length: int = 3584,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    clamp: bool = True,
    unit: Literal["tokens", "characters"] = "tokens",
) -> float | None:
    """The cosine reward without a penalty for reaching the limit: right 1 falling to 0.5, wrong -1 rising to -0.5.

    Open-RS (2503.16219) with its values; it counts characters. clamp: lengths beyond max_length count as max_length;
    without, as in its code, the cosine turns back and a right answer of twice the length gets 1 again. None if
    correctness is unknown.
    """
    if correct is None:
        return None
    share = (token_count if unit == "tokens" else len(completion)) / max_length
    start, end = (max_value_correct, min_value_correct) if correct else (min_value_wrong, max_value_wrong)
    return efficiency.half_cosine(start, end, min(share, 1.0) if clamp else share)


def ngram_repetition(
    completion: str,
    token_ids: Sequence[int] = (),
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    unit: Literal["token", "word"] = "token",
) -> float:
    """max_penalty * (share of n-grams that occurred before), 0 for fewer than ngram_size items.

    n-grams of tokens as in TRL, or of lower-cased words as in open-r1. 3-grams repeat in any honest derivation of some
    thousand tokens: take 20 and more there (2502.03373 has 40).
    """
    tokens = token_ids if unit == "token" else None
    return efficiency.repetition_penalty(completion, tokens, n=ngram_size, max_penalty=max_penalty)


def l1_exact(
    completion: str, token_count: int, target: float | None, correct: bool | None, *, alpha: float = 0.0003
) -> float | None:
    """1 or 0 for the answer, less alpha for each token above or below `target`; wrong answers are pulled there too.

    L1 (2503.04697, LCPO-Exact). The prompt says "Think for N tokens.", N in the column `target`. None without a target.
    """
    if target is None or correct is None:
        return None
    return efficiency.exact_budget(float(correct), token_count, target, alpha=alpha)


def l1_max(
    completion: str,
    token_count: int,
    target: float | None,
    correct: bool | None,
    budget_mode: str = "max",
    *,
    alpha: float = 0.0003,
    delta: float = 0.5,
) -> float | None:
    """Right: alpha * (target - tokens) + delta, within 0 and 1; wrong: 0. Fewer are better.

    L1 (2503.04697, LCPO-Max, the paper's formula; alpha halved gives that of its code). Rows whose column `budget_mode`
    is `exact` get l1_exact: the paper trains on half of each. None without a target.
    """
    if target is None or correct is None:
        return None
    if budget_mode == "exact":
        return efficiency.exact_budget(float(correct), token_count, target, alpha=alpha)
    return efficiency.max_budget(float(correct), token_count, target, alpha=alpha, delta=delta)


_BUDGET = {"max_length": 100, "buffer": 20}
_COSINE = {"max_length": 1000, "margin": 0}

EXAMPLES = {
    "soft_overlong": [
        ("short", {"token_count": 80}, 0.0, _BUDGET),
        ("half way through the buffer", {"token_count": 90}, -0.5, _BUDGET),
        ("cut at the limit", {"token_count": 100}, -1.0, _BUDGET),
        ("beyond", {"token_count": 101}, -0.3, {**_BUDGET, "factor": 0.3}),
        ("", {"token_count": 0}, 0.0, _BUDGET),
        ("a step", {"token_count": 101}, -1.0, {"max_length": 100, "buffer": 0}),
    ],
    "truncation": [
        ("right and short", {"token_count": 44, "correct": True}, 1.0, {"max_length": 44}),
        ("right and long", {"token_count": 45, "correct": True}, 0.0, {"max_length": 44}),
        ("right and cut", {"token_count": 44, "correct": True, "truncated": True}, 0.0, {"max_length": 44}),
        ("wrong", {"token_count": 3, "correct": False}, 0.0, {"max_length": 44}),
        ("", {"token_count": 0, "correct": False}, 0.0, {"max_length": 44}),
        ("who knows", {"token_count": 3, "correct": None}, None, {"max_length": 44}),
    ],
    "cosine": [
        ("right, empty", {"token_count": 0, "correct": True}, 2.0, _COSINE),
        ("right, half", {"token_count": 500, "correct": True}, 1.5, _COSINE),
        ("wrong, half", {"token_count": 500, "correct": False}, -5.0, _COSINE),
        ("", {"token_count": 0, "correct": False}, -10.0, _COSINE),
        ("right, cut", {"token_count": 999, "correct": True, "truncated": True}, -10.0, _COSINE),
        ("right, in the margin", {"token_count": 984, "correct": True}, -10.0, {"max_length": 1000}),
        ("who knows", {"token_count": 3, "correct": None}, None, _COSINE),
    ],
    "open_rs": [
        ("right, empty", {"token_count": 0, "correct": True}, 1.0),
        ("right, at the limit", {"token_count": 3584, "correct": True}, 0.5),
        ("right, beyond", {"token_count": 9000, "correct": True}, 0.5),
        ("right, twice the limit", {"token_count": 7168, "correct": True}, 1.0, {"clamp": False}),
        ("wrong, at the limit", {"token_count": 3584, "correct": False}, -0.5),
        ("", {"token_count": 0, "correct": False}, -1.0),
        ("who knows", {"token_count": 3, "correct": None}, None),
    ],
    "ngram_repetition": [
        ("a b c a b c", {"token_ids": [1, 2, 3, 1, 2, 3]}, -0.25),  # four trigrams, three of them distinct
        ("A b a B a", {}, -0.5, {"unit": "word", "ngram_size": 2}),
        ("a b c d", {"token_ids": [1, 2, 3, 4]}, 0.0),
        ("", {"token_ids": []}, 0.0),
    ],
    "l1_exact": [
        ("right, 500 short", {"token_count": 1000, "target": 1500, "correct": True}, 0.85),
        ("right, 1000 long", {"token_count": 2500, "target": 1500, "correct": True}, 0.7),
        ("", {"token_count": 0, "target": 100, "correct": False}, -0.03),
        ("no budget", {"token_count": 5, "target": None, "correct": True}, None),
    ],
    "l1_max": [
        ("right, 1000 short", {"token_count": 1000, "target": 2000, "correct": True}, 0.8),
        ("right, on budget", {"token_count": 2000, "target": 2000, "correct": True}, 0.5),
        ("right, far beyond", {"token_count": 6000, "target": 2000, "correct": True}, 0.0),
        ("exact", {"token_count": 2000, "target": 2000, "correct": True, "budget_mode": "exact"}, 1.0),
        ("", {"token_count": 0, "target": 2000, "correct": False}, 0.0),
        ("no budget", {"token_count": 5, "target": None, "correct": True}, None),
    ],
}

_ROWS = [
    {**row, "target": 50} for row in ({"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15))
]

ROWS = {
    "soft_overlong": {"rows": _ROWS, "params": _BUDGET, "correct": "math.accuracy"},
    "truncation": {"rows": _ROWS, "params": {"max_length": 100}},
    "cosine": {"rows": _ROWS, "params": _COSINE},
    "open_rs": _ROWS,
    "ngram_repetition": {"rows": _ROWS, "correct": "math.accuracy"},
    "l1_exact": _ROWS,
    "l1_max": _ROWS,
}
