r"""Rewards for length, in completion tokens.

rewards:
  - use: length.soft_overlong                # added to accuracy: 0 up to max_length - buffer, then down to -factor
    params: {max_length: 512, buffer: 128}
  - use: length.truncation                   # instead of accuracy (give accuracy weight 0): right and short enough
    params: {max_length: 512}
  - use: length.cosine                       # instead of accuracy: short right answers pay most
    params: {max_length: 512}
"""

import math


def soft_overlong(completion: str, token_count: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """0 up to max_length - buffer tokens, then linear down to -factor at max_length, -factor beyond.

    DAPO (2503.14476, eq. 13; the paper has max_length 20480, buffer 4096). A completion cut at max_length gets -factor:
    use this or `loss.mask_truncated`, not both. buffer 0: a step at max_length.
    """
    over = token_count - (max_length - buffer)
    if over <= 0:
        return 0.0
    if token_count > max_length or buffer == 0:
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
    k = 0.5 * (1.0 + math.cos(math.pi * token_count / max_length))
    if correct:
        return min_value_correct + (max_value_correct - min_value_correct) * k
    return max_value_wrong + (min_value_wrong - max_value_wrong) * k


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
}
