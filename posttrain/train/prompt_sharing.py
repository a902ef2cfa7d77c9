"""Rollouts of one prompt in one packed line that contains the prompt once.

The first row of a prompt is complete. Every other row begins with the prompt's last token, which predicts its first
completion token, and attends to the prompt of the first row before its own tokens: it sees what it would see alone, at
its usual positions, and the gradient of the prompt's states is the sum over its completions.
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

from posttrain.batch import concatenate_ranges
from posttrain.train.attention import Packed
from posttrain.train.load_balancing import group_rows

MIN_SHARED = 0.2  # share of tokens that must be skipped: below it, gathering keys and values costs more than it saves
SHARED_COST = 0.125  # memory of a skipped token relative to a computed one: its keys and values in each attending row


@dataclass(frozen=True)
class Prompts:
    """Prompts that rows have in common.

    lengths: tokens of each row. numbers: index of each row's prompt. common: tokens of the prompt that another row can
    attend to instead of computing them, which is all except the last.
    """

    lengths: tuple[int, ...]
    numbers: tuple[int, ...]
    common: tuple[int, ...]

    @classmethod
    def of(
        cls, ids: Sequence[Any], prompt_lengths: Sequence[int], images: Sequence[Sequence[Any]] | None = None
    ) -> Prompts:
        """Group rows by prompt. ids: prompt and completion of each row.

        Prompts are the same if their tokens and their images are.
        """
        known: dict[Any, int] = {}
        rows = [np.asarray(row[:count], np.int64).tobytes() for row, count in zip(ids, prompt_lengths, strict=True)]
        row_images = [()] * len(rows) if images is None else map(tuple, images)
        numbers = tuple(known.setdefault(prompt, len(known)) for prompt in zip(rows, row_images, strict=True))
        return cls(tuple(map(len, ids)), numbers, tuple(max(count - 1, 0) for count in prompt_lengths))

    def shared_token_counts(self, rows: Sequence[int]) -> list[int]:
        """Return how many tokens of each of these rows are shared with an earlier row when all stand in one line."""
        firsts: dict[int, int] = {}
        return [0 if firsts.setdefault(self.numbers[r], r) == r else self.common[r] for r in rows]

    def cost(self, rows: Sequence[int]) -> int:
        """Return the memory of one line of these rows, in computed tokens."""
        return math.ceil(sum(self.lengths[r] for r in rows) - (1 - SHARED_COST) * sum(self.shared_token_counts(rows)))

    def is_worthwhile(self) -> bool:
        """Return whether sharing skips enough tokens, if all rows are in one line."""
        return sum(self.shared_token_counts(range(len(self.lengths)))) >= MIN_SHARED * sum(self.lengths)

    def units(self, groups: Sequence[int], room: int) -> list[list[int]]:
        """Return the rows of each group, split so that each part costs at most `room` tokens or is a single row."""
        parts: list[list[int]] = []
        for rows in group_rows(groups):
            part: list[int] = []
            for row in sorted(rows, key=lambda r: (-self.lengths[r], r)):
                if part and self.cost([*part, row]) > room:
                    parts.append(part)
                    part = []
                part.append(row)
            parts.append(part)
        return parts


def build_shared_line(prompts: Prompts, filling: int, device: torch.device) -> Packed:
    """Return the layout of a line of all rows, followed by `filling` padding tokens as a row of their own."""
    skipped = prompts.shared_token_counts(range(len(prompts.lengths)))
    own = [length - skip for length, skip in zip(prompts.lengths, skipped, strict=True)]
    starts = [0, *accumulate(own)]
    firsts: dict[int, int] = {}
    spans = [  # (start, tokens) of the prompt of another row, and of the row itself
        ((starts[firsts.setdefault(number, row)], skip), (starts[row], size))
        for row, (number, skip, size) in enumerate(zip(prompts.numbers, skipped, own, strict=True))
    ]
    padding = [filling] if filling else []
    flat = [*chain.from_iterable(spans), *((starts[-1], size) for size in padding)]
    sources: Tensor = concatenate_ranges([size for _, size in flat], [start for start, _ in flat])
    return Packed.with_shared_keys([*own, *padding], [*prompts.lengths, *padding], sources, device)
