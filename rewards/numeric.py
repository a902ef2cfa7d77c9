"""How close a number is to the truth: decimals, counts, values read from a chart.

rewards:
  - use: numeric.distance         # reads the column `answer`
  - use: numeric.count            # how many?
  - use: numeric.chart            # values within a relative tolerance; words as they are
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from posttrain.verify.extract import Extractor, after_think
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.numerals import value_of
from posttrain.verify.text import exact_match, golds_of

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


def count(
    completion: str,
    answer: Any,
    *,
    extract: Sequence[Extractor] = ("boxed", "answer_tag", "anchor", "last_number"),
    partial: float = 0.0,
) -> dict[str, float] | None:
    """1 for the right number of things, in digits or English words; else `partial` * (1 - error / gold), at least 0.

    partial: below 1, for a signal before anything is right. The first place of `extract` that holds something decides.
    None if the gold is no whole number from 0 on. Logged part: exact.
    """
    truth = number(str(answer))
    if truth is None or truth < 0 or truth != int(truth):
        return None
    found = find_answer(after_think(completion), extract)
    value = None if found is None else _read_count(found)
    exact = float(value == truth)
    near = 0.0 if value is None else max(0.0, 1 - abs(value - truth) / max(truth, 1.0))
    return {"reward": exact or partial * near, "exact": exact}


def _read_count(text: str) -> float | None:
    """A number in digits, with or without what is counted behind it (`3 cats`), or in words."""
    plain = text.strip(" .!*_`\n")
    words = value_of(plain)
    return (
        float(words)
        if words is not None
        else number(plain)
        if number(plain) is not None
        else number(plain.split(" ")[0])
    )


def chart(
    completion: str,
    answer: Any,
    *,
    tolerance: float = 0.05,
    exact_years: bool = True,
    extract: Sequence[Extractor] = ("boxed", "answer_tag", "anchor"),
) -> float | None:
    """1 if a number is within the relative `tolerance` of the gold, or its words are the gold's; else 0 (2203.10244).

    Signs of percent and currencies do not count, nor do thousands commas; 0.12 is 12%. exact_years: a gold that is a
    whole number from 1900 to 2100 must be met exactly (ours: 5% of a year is a century). Of a list of golds any is
    right. The first place of `extract` that holds something decides, else all of the text behind the thought. None
    without a gold.
    """
    golds = golds_of(answer)
    if not golds:
        return None
    text = after_think(completion)
    found = find_answer(text, extract)
    read = text if found is None else found
    return float(any(_is_near(read, gold, tolerance, exact_years) for gold in golds))


def _is_near(text: str, gold: str, tolerance: float, exact_years: bool) -> bool:
    values, truths = _chart_values(text), _chart_values(gold)
    if not truths:
        return not values and exact_match(text, [gold]) > 0
    if not values:
        return False
    one_percent = len(values) != len(truths)  # written with the sign on one side: 12% may be 12 or 0.12 on the other
    pairs = [(value, truth) for value in values for truth in truths] if one_percent else [(values[0], truths[0])]
    return any(_within(value, truth, tolerance, exact_years) for value, truth in pairs)


def _within(value: float, truth: float, tolerance: float, exact_years: bool) -> bool:
    year = exact_years and truth == int(truth) and 1900 <= truth <= 2100
    return value == truth if year else abs(value - truth) <= tolerance * abs(truth)


def _chart_values(text: str) -> list[float]:
    """What a value of a chart may mean: itself, with a sign of percent also its hundredth; [] for words."""
    plain = text.strip().strip(".*_` ").lstrip("$€£¥").strip()
    value = number(plain.rstrip("% "))
    if value is None:
        return []
    return [value, value / 100] if plain.endswith("%") else [value]


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
    ],
    "count": [
        ("<answer>3</answer>", {"answer": 3}, {"reward": 1.0, "exact": 1.0}),
        ("There are 3 red circles.", {"answer": "3"}, 1.0),
        ("<answer>three</answer>", {"answer": 3}, 1.0),
        ("<answer>3 red circles</answer>", {"answer": 3}, 1.0),
        ("<answer>5</answer>", {"answer": 4}, {"reward": 0.375, "exact": 0.0}, {"partial": 0.5}),
        ("<answer>5</answer>", {"answer": 4}, 0.0),
        ("<answer>9</answer>", {"answer": 0}, 0.0, {"partial": 0.5}),
        ("none", {"answer": 3}, 0.0),
        ("", {"answer": 3}, 0.0),
        ("3", {"answer": "some"}, None),
        ("3", {"answer": -1}, None),
    ],
    "chart": [
        ("<answer>104</answer>", {"answer": "100"}, 1.0),
        ("<answer>106</answer>", {"answer": "100"}, 0.0),
        ("<answer>12%</answer>", {"answer": "12"}, 1.0),
        ("<answer>12%</answer>", {"answer": 0.12}, 1.0),
        ("<answer>0.12%</answer>", {"answer": "12%"}, 0.0),
        ("$1,234.00", {"answer": "1234"}, 1.0),
        ("<answer>2011</answer>", {"answer": "2010"}, 0.0),
        ("<answer>2011</answer>", {"answer": "2010"}, 1.0, {"exact_years": False}),
        ("<answer>-1</answer>", {"answer": "1"}, 0.0),
        ("<answer>0.01</answer>", {"answer": 0}, 0.0),
        ("<answer>The Red line</answer>", {"answer": "red line"}, 1.0),
        ("<answer>Norway</answer>", {"answer": ["Sweden", "Norway"]}, 1.0),
        ("<answer>blue line</answer>", {"answer": "red line"}, 0.0),
        ("", {"answer": "100"}, 0.0),
        ("12", {"answer": None}, None),
    ],
}

ROWS = {
    "distance": [{"prompt": "How much?", "answer": answer} for answer in ("12.5", "-3", "140", "0.25")],
    "count": [{"prompt": "How many cats?", "answer": answer} for answer in (2, 7, 13)],
    "chart": [{"prompt": "What is the largest value?", "answer": answer} for answer in ("12.5", "140", "2010", "7%")],
}
