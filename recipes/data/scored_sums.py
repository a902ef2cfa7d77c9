"""Sums of 3-digit numbers with a working, the answer, and a score from 1 to 5 of how much reasoning they take.

The score counts carries, in place of a judge: none 1, one 2, two 4, three 5. Every seventh row has no score.
"""

import random
from typing import Any


def rows(size: int, seed: int) -> list[dict[str, Any]]:
    """`size` different rows: prompt, completion, answer, reasoning."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < size:
        a, b = draw.randrange(100, 1000), draw.randrange(100, 1000)
        prompt = f"{a}+{b}=?"
        score = None if len(found) % 7 == 6 else (1, 2, 4, 5)[carries(a, b)]
        found[prompt] = {
            "prompt": prompt,
            "completion": f"<answer>{a + b}</answer>",
            "answer": str(a + b),
            "reasoning": score,
        }
    return list(found.values())


def carries(a: int, b: int) -> int:
    """How many columns of a sum carry."""
    count = carry = 0
    for column in range(3):
        carry = (a // 10**column % 10 + b // 10**column % 10 + carry) // 10
        count += carry
    return count
