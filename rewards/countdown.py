"""Countdown: an expression in `<answer>` that uses each given number once and comes to the target.

rewards:
  - use: countdown.expression     # reads the columns `target` and `numbers`
"""

import ast
import math
import operator
import re
from collections.abc import Sequence

from posttrain.verify.extract import last_tag, outside_thoughts

_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_CLOSE = 1e-5
_LONGEST = 1000  # characters; the parser is recursive


def expression(
    completion: str,
    target: float | str | None,
    numbers: Sequence[int | str] | str | None,
    *,
    score: float = 1.0,
    format_score: float = 0.1,
) -> float | None:
    """`score` if the last answer is right, 0 without an answer, `format_score` for any other answer.

    One in the thought is none. Right: only digits, + - * / ( ) and blanks, so that 3 and 5 do not become 3.5; its
    integers are exactly the given ones; value within 1e-5 of the target. It is read by a small parser, never evaluated
    as code. target and numbers may be texts (`"16"`, `["3", "5"]`, `"[3, 5]"`); null: no score.
    """
    if target is None or numbers is None:
        return None
    wanted, given = read_target(target), read_numbers(numbers)
    answer = last_tag(outside_thoughts(completion), "answer")
    if answer is None:
        return 0.0
    text = answer.strip()
    if not _ALLOWED.fullmatch(text) or len(text) > _LONGEST:
        return format_score
    if sorted(map(int, re.findall(r"[0-9]+", text))) != given:
        return format_score
    value = evaluate(text)
    return score if value is not None and abs(value - wanted) < _CLOSE else format_score


def read_target(target: float | str) -> float:
    """The target as a number. Raises ValueError if it is none."""
    try:
        value = float(target)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"`target` must be a number, not {target!r:.80}")
    return value


def read_numbers(numbers: Sequence[int | str] | str) -> list[int]:
    """The given numbers, sorted. Raises ValueError if they are no whole numbers from 0 on."""
    try:
        listed = re.split(r"[\s,]+", numbers.strip(" []()")) if isinstance(numbers, str) else list(numbers)
        found = sorted(int(float(number)) for number in listed)
        whole = sorted(map(float, listed)) == found and found and found[0] >= 0
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"`numbers` must be a list of whole numbers, not {numbers!r:.80}")
    return found


def evaluate(text: str) -> float | None:
    """The value of an expression of numbers, + - * / and brackets; None if it is none, or divides by zero."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an expression of numbers")


_TASK = {"target": 16, "numbers": [3, 5, 2]}

EXAMPLES = [
    ("x <answer>(3+5)*2</answer>", _TASK, 1.0),
    ("<answer>3+5+2</answer>", _TASK, 0.1),
    ("<answer>3+5</answer>", _TASK, 0.1),
    ("<answer>(3+5)*2</answer>", {"target": "16", "numbers": ["3", "5", "2"]}, 1.0),
    ("<answer>(3+5)*2</answer>", {"target": 16.0, "numbers": "[3, 5, 2]"}, 1.0),
    ("<answer>(3+5)*2</answer>", {"target": None, "numbers": [3, 5, 2]}, None),
    ("no answer", _TASK, 0.0),
    ("", _TASK, 0.0),
    ("<answer>(3+5)*2 = 16</answer>", _TASK, 0.1),
    ("<answer>(3+5)**2</answer>", {"target": 64, "numbers": [3, 5, 2]}, 0.1),
    ("<answer>3/(5-5)</answer>", {"target": 1, "numbers": [3, 5, 5]}, 0.1),
    ("<answer></answer>", _TASK, 0.1),
    ("<answer>\n(3+5)*2\n</answer>", _TASK, 1.0),
    ("<answer>3.5*2</answer>", {"target": 7, "numbers": [3, 5, 2]}, 0.1),
]

ROWS = [
    {"prompt": "Make 16 of 3, 5 and 2.", "target": 16, "numbers": [3, 5, 2], "answer": "(3+5)*2"},
    {"prompt": "Make 7 of 10, 4 and 1.", "target": 7, "numbers": [10, 4, 1], "answer": "10-4+1"},
]
