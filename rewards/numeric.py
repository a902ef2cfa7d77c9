"""How close a number is to the truth: for arithmetic whose answers are decimals.

rewards:
  - use: numeric.distance         # reads the column `answer`
"""

from collections.abc import Sequence

from posttrain.verify.extract import Extractor, after_think
from posttrain.verify.extract import extract as find_answer


def distance(
    completion: str,
    answer: str | float,
    *,
    extract: Sequence[Extractor] = ("boxed", "answer_tag", "last_number"),
    eps: float = 1e-6,
) -> float | None:
    """Half an absolute and half a relative error, each capped at 1, taken from 1; 0 if no number is found.

    The first place of `extract` that holds something decides. None if the gold is no number.
    """
    try:
        truth = float(answer)
    except ValueError:
        return None
    found = find_answer(after_think(completion), extract)
    try:
        value = None if found is None else float(found.replace(",", "").strip(" $"))
    except ValueError:
        value = None
    return closeness(value, truth, eps=eps)


def closeness(value: float | None, truth: float, *, eps: float = 1e-6) -> float:
    """1 - min(|a-b|, 1)/2 - min(|a-b|/(|b|+eps), 1)/2; 0 for no number, or one that is not finite."""
    if value is None or not abs(value) < float("inf"):
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
    ]
}

ROWS = [{"prompt": "How much?", "answer": answer} for answer in ("12.5", "-3", "140", "0.25")]
