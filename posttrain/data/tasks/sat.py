"""SATURN (arXiv 2505.16368): satisfiability problems with a formula for their difficulty."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Sequence
from typing import Any

from posttrain.errors import DataError
from posttrain.registry import register

_PROMPT = (
    "Find values for the variables {names} that make every clause true. Clauses are joined by ` & `; a clause is true "
    "if at least one of its literals is. `A` is true if A is 1, `!A` if A is 0.\n{formula}\n"
    "Give the values as a string of {count} bits in the order {names}, inside \\boxed{{}}."
)


@register("task", "saturn", paper="2505.16368", note="The paper's stages differ little: (3, 5, 5), (3, 5, 6).")
def saturn(
    level: int,
    draw: random.Random,
    *,
    stages: Sequence[Sequence[int]] = ((3, 5, 5), (3, 5, 6), (3, 5, 7), (3, 5, 8)),
    template: str = _PROMPT,
) -> dict[str, Any]:
    """Generate a satisfiable formula of l clauses with n literals each over k variables.

    Score it with `sat.assignment`. stages: [n, k, l] by level. template: the prompt, with {names}, {formula} and
    {count}. Columns: formula, answer (the hidden assignment; any other satisfying assignment is correct too),
    difficulty.
    """
    if level >= len(stages):
        raise DataError(f"task:saturn has no level {level}", allowed=f"{len(stages)} stages: 0 to {len(stages) - 1}")
    n, k, l = _stage(stages[level])  # noqa: E741  the paper's letters
    bits = [draw.randrange(2) for _ in range(k)]
    clauses = draw.sample(satisfied_clauses(bits, n), l)
    formula = " & ".join(clauses)
    names = string.ascii_uppercase[:k]
    return {
        "prompt": template.format(names=names, formula=formula, count=k),
        "answer": "".join(map(str, bits)),
        "formula": formula,
        "difficulty": difficulty(n, k, l),
    }


def _stage(stage: Sequence[int]) -> tuple[int, int, int]:
    """Return (n, k, l). Raises DataError for an impossible stage."""
    if len(stage) != 3 or not 1 <= stage[0] <= stage[1] <= len(string.ascii_uppercase) or stage[2] < 1:
        raise DataError(f"task:saturn: stage {list(stage)}", allowed="[n, k, l] with 1 <= n <= k <= 26 and l >= 1")
    n, k, l = stage  # noqa: E741
    possible = math.comb(k, n) * (2**n - 1)
    if l > possible:
        raise DataError(
            f"task:saturn: stage {list(stage)}", allowed=f"one assignment satisfies {possible} such clauses"
        )
    return n, k, l


def satisfied_clauses(bits: Sequence[int], n: int) -> list[str]:
    """Return all clauses of n different variables that an assignment satisfies, each with its variables in order."""
    clauses = []
    for variables in itertools.combinations(range(len(bits)), n):
        for agree in range(1, 2**n):  # bit mask of the literals that are true under the assignment: at least one
            literals = [
                ("" if bits[v] == (agree >> bit & 1) else "!") + string.ascii_uppercase[v]
                for bit, v in enumerate(variables)
            ]
            clauses.append("".join(literals))
    return clauses


def difficulty(n: float, k: float, l: float) -> float:  # noqa: E741
    """Compute SATURN's difficulty log2(k) + 2 log2(l) - n + k / n.

    More clauses and variables are harder, longer clauses easier.
    """
    return math.log2(k) + 2 * math.log2(l) - n + k / n


EXAMPLES = [
    (0, {"stages": [[1, 2, 2]]}, {"formula": "A & B", "answer": "11"}),
    (0, {}, {"difficulty": 5.632450951328754}),
]
