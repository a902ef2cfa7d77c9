"""Sums of four numbers, added up line by line; in half of the traces one line is wrong and the rest follows from it.

    4+7+2+5=?    4+7=11\n11+2=12\n12+5=17\n<answer>17</answer>

Traces of whatever origin, with the right answer: what offline RL trains on (`rollout.engine: stored`). Used as
`source: ../data/traces.py:traces` by recipes/rl/oreo_tiny.yaml and others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def traces(size: int, seed: int, *, slips: float = 0.5) -> Iterator[dict[str, str]]:
    """`size` rows {prompt, completion, answer}; a share `slips` of the completions is wrong."""
    draw = random.Random(f"traces/{seed}")
    for _ in range(size):
        numbers = [draw.randint(1, 9) for _ in range(4)]
        slip = draw.randrange(3) if draw.random() < slips else None
        total, lines = numbers[0], []
        for place, number in enumerate(numbers[1:]):
            found = total + number + (draw.choice([-1, 1]) if place == slip else 0)
            lines.append(f"{total}+{number}={found}")
            total = found
        yield {
            "prompt": "+".join(map(str, numbers)) + "=?",
            "completion": "\n".join([*lines, f"<answer>{total}</answer>"]),
            "answer": str(sum(numbers)),
        }


def digits(completion: str) -> float:
    """The share of digits: a reward that even an untrained model can raise (recipes/rl/nash_mp_tiny.yaml)."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
