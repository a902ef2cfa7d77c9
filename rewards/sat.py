r"""An assignment that satisfies a formula, in `\boxed{}`: SATURN (2505.16368).

rewards:
  - use: sat.assignment           # reads the column `formula`, as rows of `source: task:saturn` have it
"""

from posttrain.verify.extract import after_think
from posttrain.verify.sat import assignment_reward, falsify


def assignment(completion: str, formula: str | None, *, plain: bool = False) -> float | None:
    """1 if the bits of the last box satisfy every clause, 0 if not, -1 without a box; None without a formula.

    A box in the thought is none (the authors' code counts it). Any assignment that satisfies the formula is right; bits
    beyond the end of the box are 0. plain: no box earns 0.
    """
    if formula is None:
        return None
    earned = assignment_reward(formula, after_think(completion))
    return max(earned, 0.0) if plain else earned


_ROW = {"formula": "A!B & !AC & BC"}

EXAMPLES = [
    (r"so \boxed{001}", _ROW, 1.0),
    (r"first \boxed{111} then \boxed{010}", _ROW, 0.0),
    ("A=1, B=0", _ROW, -1.0),
    ("A=1, B=0", _ROW, 0.0, {"plain": True}),
    (r"\boxed{}", {"formula": "!A & !B"}, 1.0),
    (r"\boxed{11}", {"formula": "A & C"}, 0.0),
    ("", _ROW, -1.0),
    (r"\boxed{1}", {"formula": None}, None),
]


def GOLD(row: dict) -> str | None:
    """The hidden assignment, boxed."""
    return rf"\boxed{{{row['answer']}}}" if row.get("formula") is not None and row.get("answer") else None


def NEAR_MISS(row: dict) -> str:
    """The hidden assignment but for the variables of the first clause, which make it false."""
    return rf"\boxed{{{falsify(row['formula'], row['answer'])}}}"


ROWS = [
    {"prompt": "Satisfy A!B & !AC & BC", "formula": "A!B & !AC & BC", "answer": "111"},
    {"prompt": "Satisfy AB & !B", "formula": "AB & !B", "answer": "10"},
    {"prompt": "Satisfy !A!B & B", "formula": "!A!B & B", "answer": "01"},
]
