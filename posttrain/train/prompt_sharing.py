"""Rollouts of one prompt in one packed line, in which the prompt stands once.

The first row of a prompt is whole. Every other begins with the prompt's last token, which predicts its first completion
token, and attends to the prompt of the first row before its own tokens: it sees what it would see alone, at positions
of its own, and the gradient of the prompt's states is the sum over its completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.batch import ranges
from posttrain.train.attention import Packed

LEAST = 0.2  # share of the tokens that must fall away: less does not pay for keys and values that are gathered
KEPT = 0.125  # of a token that falls away, the memory that stays: its keys and values, in each row that attends to it


@dataclass(frozen=True)
class Prompts:
    """What rows of prompt and completion have in common: the tokens of each row, the number of its prompt, and how many
    of the prompt's tokens another row can attend to in its place: all but the last."""

    lengths: tuple[int, ...]
    numbers: tuple[int, ...]
    common: tuple[int, ...]

    @classmethod
    def of(
        cls, ids: Sequence[Any], prompt_lengths: Sequence[int], images: Sequence[Sequence[Any]] | None = None
    ) -> Prompts:
        """ids: prompt and completion of each row. Prompts are the same where their tokens are, and the images that
        stand in each of them."""
        known: dict[Any, int] = {}
        rows = [np.asarray(row[:count], np.int64).tobytes() for row, count in zip(ids, prompt_lengths, strict=True)]
        shown = [()] * len(rows) if images is None else map(tuple, images)
        numbers = tuple(known.setdefault(prompt, len(known)) for prompt in zip(rows, shown, strict=True))
        return cls(tuple(map(len, ids)), numbers, tuple(max(count - 1, 0) for count in prompt_lengths))

    def shared_token_counts(self, rows: Sequence[int]) -> list[int]:
        """How many tokens of each of these rows need no pass of their own when they stand in one line."""
        firsts: dict[int, int] = {}
        return [0 if firsts.setdefault(self.numbers[r], r) == r else self.common[r] for r in rows]

    def cost(self, rows: Sequence[int]) -> int:
        """The tokens of one line of these rows, by the memory that they take."""
        return math.ceil(sum(self.lengths[r] for r in rows) - (1 - KEPT) * sum(self.shared_token_counts(rows)))

    def pays(self) -> bool:
        """Whether enough tokens need no pass, were all rows in one line."""
        return sum(self.shared_token_counts(range(len(self.lengths)))) >= LEAST * sum(self.lengths)

    def units(self, groups: Sequence[int], room: int) -> list[list[int]]:
        """Rows of each group, cut so that none of the parts costs more than `room` tokens, or it is one row."""
        parts: list[list[int]] = []
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        for rows in members.values():
            part: list[int] = []
            for row in sorted(rows, key=lambda r: (-self.lengths[r], r)):
                if part and self.cost([*part, row]) > room:
                    parts.append(part)
                    part = []
                part.append(row)
            parts.append(part)
        return parts


def build_shared_line(prompts: Prompts, filling: int, device: torch.device) -> Packed:
    """Who attends to what in a line of all rows, with `filling` tokens of nobody after it."""
    skipped = prompts.shared_token_counts(range(len(prompts.lengths)))
    own = [length - skip for length, skip in zip(prompts.lengths, skipped, strict=True)]
    starts = [0, *accumulate(own)]
    firsts: dict[int, int] = {}
    spans = [  # (start, tokens) of the prompt of another row, and of the row itself
        ((starts[firsts.setdefault(number, row)], skip), (starts[row], size))
        for row, (number, skip, size) in enumerate(zip(prompts.numbers, skipped, own, strict=True))
    ]
    rest = [filling] if filling else []
    flat = [*chain.from_iterable(spans), *((starts[-1], size) for size in rest)]
    sources: Tensor = ranges([size for _, size in flat], [start for start, _ in flat])
    return Packed.with_shared_keys([*own, *rest], [*prompts.lengths, *rest], sources, device)
