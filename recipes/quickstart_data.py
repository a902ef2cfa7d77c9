"""Adding two 3-digit numbers column by column, as a demonstrator does who often forgets the carry.

    458+367=?   <think>8+7+0=15 6+5+1=12 3+4+1=08</think><answer>825</answer>

Each column adds two digits and the carry. In a demonstration a carry into the tens or the hundreds is forgotten with
probability `forget`; what follows is consistent with the mistake. The skill is in the data and so is the bad habit, and
no amount of imitation can tell them apart. A reward that checks the answer can.

Problems whose text has a CRC-32 divisible by 10 are held out: they are in no training set.
"""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path


def demonstrations(size: int, seed: int, forget: float = 0.65) -> list[dict[str, str]]:
    """`size` rows to imitate: prompt and completion."""
    random_ = random.Random(f"demonstrations {seed}")
    return [
        {"prompt": question(a, b), "completion": solution(a, b, lambda: random_.random() < forget)}
        for a, b in _numbers(size, random_, False)
    ]


def problems(size: int, seed: int) -> list[dict[str, str]]:
    """`size` rows to solve: prompt and the right answer. No problem comes twice."""
    return [{"prompt": question(a, b), "answer": str(a + b)} for a, b in _numbers(size, random.Random(seed), False)]


def held_out(size: int, seed: int) -> list[dict[str, str]]:
    """The same from problems that are in no training set."""
    return [{"prompt": question(a, b), "answer": str(a + b)} for a, b in _numbers(size, random.Random(seed), True)]


def pairs(size: int, seed: int, completions: Path) -> list[dict[str, str]]:
    """`size` rows to prefer by: a right and a wrong completion of the model's own to the same prompt.

    completions: the completions.jsonl of a `generate` stage with several samples a prompt. Every prompt that has both
    gives one pair before any gives a second. Fewer rows come back where there are not enough.
    """
    by_prompt: dict[str, tuple[list[str], list[str]]] = {}
    with completions.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            a, b = map(int, re.findall(r"\d+", row["prompt"]))
            right = row["completion"].endswith(f"<answer>{a + b}</answer>")
            by_prompt.setdefault(question(a, b), ([], []))[0 if right else 1].append(row["completion"])
    random_ = random.Random(seed)
    found: list[tuple[int, dict[str, str]]] = []
    for prompt, (right, wrong) in by_prompt.items():
        random_.shuffle(right)
        random_.shuffle(wrong)
        both = zip(right, wrong, strict=False)  # as many as the rarer kind has
        found += [(i, {"prompt": prompt, "chosen": r, "rejected": w}) for i, (r, w) in enumerate(both)]
    return [pair for _, pair in sorted(found, key=lambda item: item[0])[:size]]


def question(a: int, b: int) -> str:
    return f"{a}+{b}=?"


def solution(a: int, b: int, forgets: Callable[[], bool] = lambda: False) -> str:
    """The working and the answer. `forgets()` is asked at each carry into the tens and the hundreds."""
    steps, digits, carry = [], "", 0
    for column in range(3):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        digits = str(total % 10) + digits
        carry = total // 10
        if column < 2 and carry and forgets():
            carry = 0
    answer = (str(carry) if carry else "") + digits
    return f"<think>{' '.join(steps)}</think><answer>{answer}</answer>"


def _numbers(size: int, random_: random.Random, held_out: bool) -> Iterator[tuple[int, int]]:
    """`size` different pairs of 3-digit numbers, all held out or none."""
    seen: set[tuple[int, int]] = set()
    while len(seen) < size:
        pair = random_.randint(100, 999), random_.randint(100, 999)
        if pair not in seen and (zlib.crc32("{}+{}".format(*pair).encode()) % 10 == 0) == held_out:
            seen.add(pair)
            yield pair
