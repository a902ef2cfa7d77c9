"""Rewards for maze paths written as moves (Ariadne, arXiv 2511.00710). Pure functions of text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_MOVE = re.compile(r"<\|(?:up|down|left|right)\|>")
_ONLY_MOVES = re.compile(rf"(?:{_MOVE.pattern})+")


def maze_reward(
    completion: str,
    answer: str,
    *,
    prefix_turns: bool = False,
    weights: Sequence[float] = (1.0, 0.1, 0.1),
    normalise: bool = False,
) -> dict[str, float]:
    """Score moves against the only correct path: {"reward", "path_reward", "action_format", "tag_format"}.

    The answer is the text after the first `</think>`, up to a second one; empty without one. path_reward: 2 * steps *
    (turns + 1) if the answer equals the reference; else k, the length of the longest common prefix of moves, times
    (turns in the prefix + 1) with `prefix_turns`. action_format: 1 if the answer has moves and nothing else but blanks.
    tag_format: 0.5 for exactly one `<think>` plus 0.5 for exactly one `</think>`. reward: sum by `weights`; with
    `normalise`, path_reward is divided by its maximum (not in the paper: its path reward grows with the path).
    """
    cut = completion.split("</think>")
    found = cut[1].strip() if len(cut) > 1 else ""
    wanted, moves = _MOVE.findall(answer), _MOVE.findall(found)
    highest = 2.0 * len(wanted) * (_turns(wanted) + 1)
    if found and found == answer.strip():
        path = highest
    else:
        k = next(
            (i for i, (a, b) in enumerate(zip(moves, wanted, strict=False)) if a != b), min(len(moves), len(wanted))
        )
        path = float(k * (_turns(moves[:k]) + 1) if prefix_turns else k)
    action = float(bool(_ONLY_MOVES.fullmatch(re.sub(r"\s", "", found))))
    tags = 0.5 * (completion.count("<think>") == 1) + 0.5 * (completion.count("</think>") == 1)
    paid = path / highest if normalise and highest else path
    reward = weights[0] * paid + weights[1] * action + weights[2] * tags
    return {"reward": reward, "path_reward": path, "action_format": action, "tag_format": tags}


def _turns(moves: Sequence[str]) -> int:
    return sum(a != b for a, b in itertools.pairwise(moves))
