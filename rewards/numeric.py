"""How close a number is to the truth: for arithmetic whose answers are decimals.

rewards:
  - use: numeric.distance         # reads the column `answer`
"""

import math
import re
from collections.abc import Sequence

from posttrain.verify.extract import Extractor, after_think
from posttrain.verify.extract import extract as find_answer

_PLAIN = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?", re.IGNORECASE)


def distance(
    completion: str,
    answer: str | float | None,
    *,
    extract: Sequence[Extractor] = ("boxed", "answer_tag", "last_number"),
    eps: float = 1e-6,
) -> float | None:
    """Half an absolute and half a relative error, each capped at 1, taken from 1; 0 if no number is found.

    The first place of `extract` that holds something decides. None if the gold is no finite number.
    """
    truth = number(str(answer))
    if truth is None:
        return None
    found = find_answer(after_think(completion), extract)
    return closeness(None if found is None else number(found), truth, eps=eps)


def number(text: str) -> float | None:
    """The finite number that a text is: ASCII digits, thousands commas, `$` or blanks around; None if it is none."""
    plain = text.replace(",", "").replace("\N{MINUS SIGN}", "-").strip(" $\t\r\n")
    value = float(plain) if _PLAIN.fullmatch(plain) else math.inf
    return value if math.isfinite(value) else None


def closeness(value: float | None, truth: float, *, eps: float = 1e-6) -> float:
    """1 - min(|a-b|, 1)/2 - min(|a-b|/(|b|+eps), 1)/2; 0 for no number, or one that is not finite."""
    if value is None or not math.isfinite(value):
        return 0.0
    error = abs(value - truth)
    return 1 - 0.5 * min(error, 1.0) - 0.5 * min(error / (abs(truth) + eps), 1.0)


EXAMPLES = {
    "distance": [
        (r"\boxed{12.5}", {"answer": "12.5"}, 1.0),
        ("about 12", {"answer": "12"}, 1.0),
        (r"\boxed{30}", {"answer": "10"}, 0.0),
        ("none", {"answer": "10"}, 0.0),
        ("", {"answer": "10"}, 0.0),
        ("12", {"answer": "abc"}, None),
        ("12", {"answer": "nan"}, None),
        ("12", {"answer": None}, None),
        (r"\boxed{1234}", {"answer": "1,234"}, 1.0),
        (r"\boxed{1e999}", {"answer": "10"}, 0.0),
    ]
}

ROWS = [{"prompt": "How much?", "answer": answer} for answer in ("12.5", "-3", "140", "0.25")]
