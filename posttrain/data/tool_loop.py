"""Training mask of a tool loop with a fixed window, computed from token counts alone.

`rl` keeps the tokens themselves with their origin (`batch.Segment`) and cuts them in `rollout.turns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """Training mask of a row, and its counts.

    mask: max_length flags, True for the model's tokens. length: number of model tokens; total: including tool output.
    """

    mask: list[bool]
    length: int
    total: int
    truncated: bool
    tool_calls: int


def layout(segments: Sequence[tuple[str, int]], max_length: int) -> Layout:
    """Return the mask of segments (kind, token count) that follow the prompt, cut at max_length.

    A row is truncated if anything was cut, or if the last remaining segment is tool output: the model never answered.
    tool_calls counts the tool segments with at least one remaining token. Kinds other than model and tool (inserted by
    a trainer) are neither trained on nor counted.
    """
    mask: list[bool] = []
    kept: list[str] = []
    cut = False
    for kind, count in segments:
        room = min(count, max_length - len(mask))
        cut = cut or room < count
        if room > 0:
            mask += [kind == "model"] * room
            kept.append(kind)
    truncated = cut or (bool(kept) and kept[-1] == "tool")
    padding = [False] * (max_length - len(mask))
    return Layout(mask + padding, sum(mask), len(mask), truncated, kept.count("tool"))
