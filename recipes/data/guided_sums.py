"""The quickstart's problems with a worked solution and a hint in words beside each: rows for hints and given solutions.

prompt 458+367=?   answer 825   solution <think>8+7+0=15 6+5+1=12 3+4+1=08</think><answer>825</answer>
"""

import random
import runpy
from pathlib import Path

SUMS = runpy.run_path(str(Path(__file__).parents[1] / "quickstart_data.py"))


def problems(size: int, seed: int) -> list[dict[str, str]]:
    """`size` rows: prompt, right answer, a solution without a mistake, and a hint that does not name the answer."""
    return [
        {
            "prompt": SUMS["question"](a, b),
            "answer": str(a + b),
            "solution": SUMS["solution"](a, b),
            "hint": "Add the ones first, and carry where a column has ten or more.",
        }
        for a, b in SUMS["_numbers"](size, random.Random(seed), False)
    ]
