"""RandomCalculation (arXiv 2507.10532): freshly generated arithmetic problems with exact answers.

    data: {source: "posttrain.data.random_calculation:rows", size: 1000, params: {steps: 5}}

Operands are integers from 0 to 100, and fractions, squares and cubes of them; s steps join s + 1 operands by + - * /.
Division by zero never occurs. The answer format (a decimal of up to 6 places) is this project's choice.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from posttrain.errors import DataError
from posttrain.seeds import derive

_LARGEST = 100
_PLACES = 6


def rows(size: int, seed: int = 0, steps: int = 3) -> list[dict[str, Any]]:
    """Return `size` rows: prompt, answer (decimal), expression, steps. Row i depends only on seed, steps and i."""
    if not 1 <= steps <= 20:
        raise DataError(f"steps {steps}: from 1 to 20")
    rows = []
    for i in range(size):
        generator = random.Random(derive(seed, "random_calculation", steps, i))
        text, value = expression(steps, generator)
        prompt = f"Calculate {text}. Give the result as a decimal number in \\boxed{{}}."
        rows.append({"prompt": prompt, "answer": decimal(value), "expression": text, "steps": steps})
    return rows


def expression(steps: int, generator: random.Random) -> tuple[str, Fraction]:
    """Return an expression with `steps` operations and its exact value."""
    if steps == 0:
        return _element(generator)
    left_steps = generator.randrange(steps)
    left, a = expression(left_steps, generator)
    while True:
        right, b = expression(steps - 1 - left_steps, generator)
        sign = generator.choice("+-*/")
        if sign != "/" or b != 0:
            break
    value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[sign]()
    return f"({left} {sign} {right})", value


def _element(generator: random.Random) -> tuple[str, Fraction]:
    """Return a random operand and its value."""
    kind = generator.choice(("integer", "fraction", "square", "cube"))
    first = generator.randint(0, _LARGEST)
    if kind == "fraction":
        second = generator.randint(1, _LARGEST)
        return f"({first}/{second})", Fraction(first, second)
    if kind == "integer":
        return str(first), Fraction(first)
    power = 2 if kind == "square" else 3
    return f"{first}^{power}", Fraction(first**power)


def decimal(value: Fraction) -> str:
    """Format a fraction as a decimal rounded to 6 places (half to even), without trailing zeros."""
    scaled = round(value * 10**_PLACES)
    whole, part = divmod(abs(scaled), 10**_PLACES)
    text = f"{whole}.{part:0{_PLACES}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text
