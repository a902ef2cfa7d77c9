"""Is a judgement of several answers in the right order? The referee's part of URPO (arXiv 2507.17515).

rewards:
  - use: referee.order            # reads the column `truth`: the answers' worths, in the order in which they were shown

Rows for it come from `recipes/data/referee.py`.
"""

import math
import re
from collections.abc import Sequence

from posttrain.verify.extract import after_think

LINE = re.compile(
    r"^[^\w\n]*+(?:answer\s*+)?(\d++)[^\w:=]*+[:=]\W*?(?=-?\d)(?<!-)(-?\d+(?:\.\d+)?)", re.IGNORECASE | re.MULTILINE
)


def order(completion: str, truth: Sequence[float], *, low: float = 0.0, high: float = 10.0) -> float | None:
    """Kendall's tau of the written scores, from -1 to 1: of the pairs that `truth` orders, right ones less wrong ones.

    A tie of scores counts 0. One score missing, written twice differently, or outside low to high makes the whole
    judgement worth 0. Lines look like `1: 7` or `Answer 1: 7.5`. None where `truth` orders nothing.
    """
    ordered = [(i, j) for i in range(len(truth)) for j in range(i) if truth[i] != truth[j]]
    if not ordered:
        return None
    said: dict[int, float] = {}
    for number, score in LINE.findall(after_think(completion)):
        if said.setdefault(int(number), float(score)) != float(score):
            return 0.0
    scores = [said.get(n + 1, math.nan) for n in range(len(truth))]  # nan is not within anything
    if not all(low <= score <= high for score in scores):
        return 0.0
    signs = [_sign(scores[i] - scores[j]) * _sign(truth[i] - truth[j]) for i, j in ordered]
    return sum(signs) / len(ordered)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


EXAMPLES = [
    ("1: 8\n2: 3\n3: 5", {"truth": [1, 0, 0.5]}, 1.0),
    ("1: 3\n2: 8\n3: 5", {"truth": [1, 0, 0.5]}, -1.0),
    ("Answer 1: 7\nAnswer 2: 7", {"truth": [1, 0]}, 0.0),
    ("<think>1: 9\n2: 1</think>1: 1\n2: 9", {"truth": [1, 0]}, -1.0),
    ("1: 8\n2: 3\n3: 9", {"truth": [1, 0, 0.5]}, 1 / 3),
    ("1: 8", {"truth": [1, 0]}, 0.0),
    ("1: 11\n2: 3", {"truth": [1, 0]}, 0.0),
    ("1: 8\n2: 3\n1: 2", {"truth": [1, 0]}, 0.0),
    ("", {"truth": [1, 0]}, 0.0),
    ("1: 8\n2: 3", {"truth": [1, 1]}, None),
]

ROWS = [
    {"prompt": "Grade the three answers.", "truth": [1, 0, 0.5], "answer": "1: 8\n2: 3\n3: 5"},
    {"prompt": "Grade the two answers.", "truth": [0, 1], "answer": "1: 2\n2: 9"},
]
