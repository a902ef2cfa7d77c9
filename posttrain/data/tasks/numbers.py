"""Number problems with difficulty levels: countdown, and freshly generated arithmetic (RandomCalculation)."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from posttrain.data.random_calculation import decimal, expression
from posttrain.errors import DataError
from posttrain.registry import register

MAX_DRAWS = 100_000  # random numbers drawn at most for one countdown problem


@register("task", "countdown", paper="2503.01307")
def countdown(level: int, draw: random.Random, *, largest: int = 20, largest_target: int = 200) -> dict[str, Any]:
    """Generate level + 2 numbers that an expression must combine to a target. Score it with `countdown.expression`.

    largest: highest number (the lowest is 1); largest_target: highest target. Columns: numbers, target, answer (one
    correct expression; others may exist). Raises DataError if such numbers rarely reach such a target.
    """
    if largest < 1 or largest_target < 1:
        raise DataError(f"task:countdown: largest {largest}, largest_target {largest_target}", allowed="1 or more")
    for _ in range(MAX_DRAWS // (level + 2)):
        numbers = [draw.randint(1, largest) for _ in range(level + 2)]
        text, value = str(numbers[0]), Fraction(numbers[0])
        for number in draw.sample(numbers[1:], level + 1):
            sign = draw.choice("+-*")
            text = f"({text} {sign} {number})"
            value = value + number if sign == "+" else value - number if sign == "-" else value * number
        if 0 < value <= largest_target:
            break
    else:
        raise DataError(
            f"task:countdown finds no target up to {largest_target} at level {level}, with numbers up to {largest}",
            hint="take lower levels, or a larger largest_target",
        )
    shown = draw.sample(numbers, len(numbers))
    return {
        "prompt": f"Use each of the numbers {', '.join(map(str, shown))} once, with + - * / and brackets, to make "
        f"{value}. Give the expression in <answer> </answer>.",
        "answer": text.removeprefix("(").removesuffix(")") if level == 0 else text,
        "numbers": shown,
        "target": int(value),
    }


@register("task", "random_calculation", paper="2507.10532")
def random_calculation(level: int, draw: random.Random) -> dict[str, Any]:
    """Generate arithmetic of level + 1 operations on integers, fractions and powers.

    Score it with `numeric.distance`. Columns: answer (a decimal of up to 6 places), expression, steps.
    """
    text, value = expression(level + 1, draw)
    return {
        "prompt": f"Calculate {text}. Give the result as a decimal number in \\boxed{{}}.",
        "answer": decimal(value),
        "expression": text,
        "steps": level + 1,
    }


EXAMPLES = {
    "countdown": [(0, {"largest": 1}, {"numbers": [1, 1]})],
    "random_calculation": [(2, {}, {"steps": 3})],
}
