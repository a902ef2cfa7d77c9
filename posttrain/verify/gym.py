"""reasoning-gym's scores of answers that nobody has read.

Some of its tasks run an answer as Python: countdown, puzzle24, integrals and polynomials with sympy's `parse_expr`,
binary_matrix, spiral_matrix, string_insertion and n_queens with `eval`. `__import__('os').system(...)` is then a
program. Their scorers get formulas alone, or what does nothing when it is run. And of an integral that sympy was not
asked to compute (`Integral(x**2, x)`) the derivative is always right: it is no answer where the gold is none.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from posttrain.verify.size import too_large

Score = Callable[[str, Any], float]

UNREADABLE = "("  # stands for an answer that is no formula: the task says what that earns
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "arcsin", "arccos", "arctan"}
    | {"sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "abs", "Abs", "pi"}
)
_READS_FORMULAS = re.compile(r"\b(?:parse_expr|sympify)\(")
_RUNS = re.compile(r"(?<![\w.])(?:eval|exec)\(")
_INERT = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub),
)
_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)(?![a-hk-z])", re.IGNORECASE)
_CHARACTERS = re.compile(r"[\w\s+\-*/^().,=×÷·−]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]|[A-Za-z_)]\s*\.")


@functools.cache
def scorer(task: str) -> Score:
    """The scoring function of a task, with the task's default configuration. Raises ValueError for no task.

    An answer on which the task's code fails scores 0, if the code works on the gold; else what it raised is raised. One
    that is not a number where the gold is (`nan` is as far from everything as from the gold) is unreadable.
    """
    import reasoning_gym

    raw: Score = reasoning_gym.get_score_answer_fn(task)
    harmless = guard(task)

    def score(answer: str, entry: Any) -> float:
        gold = str(entry["answer"])
        infinite = _NOT_FINITE.search(answer) and not _NOT_FINITE.search(gold)
        if infinite or (harmless and not harmless(answer, gold)):
            answer = UNREADABLE
        try:
            return raw(answer, entry)
        except Exception:
            raw(entry["answer"], entry)
            return 0.0

    return score


def guard(task: str) -> Callable[[str, str], bool] | None:
    """What an answer must be before it is scored, beside the gold; None for a task whose scoring runs nothing."""
    from reasoning_gym.factory import DATASETS

    source = inspect.getsource(DATASETS[task][0].score_answer)
    if _READS_FORMULAS.search(source):
        return is_formula
    return is_inert if _RUNS.search(source) else None


def is_inert(text: str, gold: str = "") -> bool:
    """Whether a text is no Python, or nothing but lists, texts, numbers and names."""
    del gold
    try:
        return all(isinstance(node, _INERT) for node in ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False


def is_formula(text: str, gold: str = "") -> bool:
    """Numbers, variables of one letter, + - * / ^ ( ) , = and functions of maths, of a bearable size; nothing else.

    Names that stand in the gold may stand in the answer.
    """
    known = FUNCTIONS.union(_NAME.findall(gold))
    names = [name for name in _NAME.findall(text) if not (len(name) == 1 and name != "_")]
    return (
        _CHARACTERS.fullmatch(text) is not None
        and known.issuperset(names)
        and not _ATTRIBUTE.search(text)
        and not too_large(re.sub(r"\s*\*\*\s*", "^", text))
    )
