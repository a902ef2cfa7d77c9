"""Demonstrations for reasoning-gym's `chain_sum` that leave a choice open: some answer at once, some show the working.

Supervised training learns both habits in the proportion in which they are shown; a verifier then finds out which of the
two is right more often. Used as `source: ../data/chain_sum.py:demonstrations`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import reasoning_gym


def demonstrations(
    size: int,
    seed: int,
    *,
    worked_share: float = 0.5,
    min_terms: int = 3,
    max_terms: int = 4,
    min_digits: int = 2,
    max_digits: int = 3,
) -> Iterator[dict[str, Any]]:
    """`size` rows {prompt, completion, answer}; a share `worked_share` of them adds up step by step."""
    chance = random.Random(f"chain_sum/{seed}")
    task = reasoning_gym.create_dataset(
        "chain_sum",
        size=size,
        seed=chance.randrange(1 << 30),
        min_terms=min_terms,
        max_terms=max_terms,
        min_digits=min_digits,
        max_digits=max_digits,
    )
    for item in task:
        thought = write_working(item["metadata"]["expression"]) if chance.random() < worked_share else ""
        yield {
            "prompt": item["question"],
            "completion": f"<think>{thought}</think><answer>{item['answer']}</answer>",
            "answer": item["answer"],
        }


def write_working(expression: str) -> str:
    """`12 + 30 - 5` -> `12 + 30 = 42; 42 - 5 = 37`."""
    total, *rest = re.findall(r"[+-]|\d+", expression)
    steps = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = str(int(total) + int(sign + term))
        steps.append(f"{total} {sign} {term} = {result}")
        total = result
    return "; ".join(steps)
