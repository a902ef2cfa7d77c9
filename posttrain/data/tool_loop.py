"""Which tokens of a tool loop are trained on, from their counts alone, in a window of fixed size. `rl` keeps the tokens
themselves, with their origin (`batch.Segment`), and cuts them in `rollout.turns`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """mask: max_length flags, True on the model's tokens. length: how many those are; total: with what tools wrote."""

    mask: list[bool]
    length: int
    total: int
    truncated: bool
    tool_calls: int


def layout(segments: Sequence[tuple[str, int]], max_length: int) -> Layout:
    """The tokens that are kept of segments (kind, token count) after the prompt, and those that are trained on.

    A row is cut at max_length. It is truncated if anything was cut, or if the last segment kept is a tool's output: the
    model never answered. tool_calls counts the tool segments of which a token is kept; kinds other than model and tool
    (what a trainer inserts) are neither trained on nor counted.
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
