"""Pairs of a right and a wrong sum, in the form that recipes/eval/smollm2_chain_sum.yaml asks for and grades.

Used as `source: ../data/sum_pairs.py:pairs`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def pairs(size: int, seed: int, *, max_number: int = 99) -> Iterator[dict[str, str]]:
    """`size` rows {prompt, chosen, rejected}: the rejected answer is off by one, by ten, or has no tags."""
    draw = random.Random(f"sum_pairs/{seed}")
    for _ in range(size):
        a, b = draw.randint(1, max_number), draw.randint(1, max_number)
        right = f"<answer>{a + b}</answer>"
        slips = [f"<answer>{a + b + slip}</answer>" for slip in (-10, -1, 1, 10)]
        yield {
            "prompt": f"State the final answer to the following arithmetic problem: {a} + {b} =",
            "chosen": right,
            "rejected": draw.choice([*slips, f"The answer is {a + b}."]),
        }
