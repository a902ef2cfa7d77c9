"""Safe scoring of untrusted answers with reasoning-gym.

Some tasks execute an answer as Python. binary_matrix, spiral_matrix, string_insertion and n_queens call `eval`, where
`__import__('os').system(...)` runs a program and `[oracle_answer]`, a variable of the scorer, is the right answer; they
get `read_literal` instead. countdown, puzzle24, integrals and polynomials call sympy's `parse_expr`; they get only
formulas. The derivative of an unevaluated integral (`Integral(x**2, x)`) is always right, so such an answer is rejected
unless the gold answer contains an integral, too.

Other tasks give full marks to wrong answers: `_CONDITIONS` holds further conditions on their answers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from posttrain import typed_json
from posttrain.errors import MissingExtra
from posttrain.verify.complexity_limits import too_large

Score = Callable[[str, Any], float]

UNREADABLE = "("  # replaces an answer that is not a formula; the task decides what it earns
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "arcsin", "arccos", "arctan"}
    | {"sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "abs", "Abs", "pi"}
)
_READS_FORMULAS = re.compile(r"\b(?:parse_expr|sympify)\(")
_SIGNED = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
MAX_LITERAL_CHARS = 200_000  # characters
_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)(?![a-hk-z])", re.IGNORECASE)
_CHARACTERS = re.compile(r"[\w\s+\-*/^().,=×÷·−]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]|[A-Za-z_)]\s*\.")


def import_tasks() -> None:
    """Import reasoning-gym with all its tasks (takes a second). Raises MissingExtra if it is not installed."""
    try:
        import reasoning_gym  # noqa: F401
    except ModuleNotFoundError as cause:
        raise MissingExtra("reasoning-gym", "the reward gym.score", "gym") from cause


@functools.cache
def scorer(task: str, params: str = "{}") -> Score:
    """Return the scoring function of a task. params: JSON text of deviations from the task's default configuration.

    An answer on which the task's code fails scores 0 if the code works on the gold answer; otherwise the exception is
    raised. A non-finite answer (`nan` is as far from everything as from the gold answer) is unreadable unless the gold
    answer is non-finite, too. Raises ValueError for a task that reasoning-gym does not have.
    """
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task}")
    kind, config = DATASETS[task]
    raw: Score = replace_eval(kind)(config=config(**json.loads(params))).score_answer
    condition = _CONDITIONS.get(task)
    formulas = _READS_FORMULAS.search(inspect.getsource(kind.score_answer)) is not None

    def score(answer: str, entry: Any) -> float:
        gold = str(entry["answer"])
        infinite = _NOT_FINITE.search(answer) and not _NOT_FINITE.search(gold)
        if infinite or (formulas and not is_formula(answer, gold)):
            answer = UNREADABLE
        try:
            earned = raw(answer, entry)
            return earned if condition is None or not earned or condition(answer, entry) else 0.0
        except Exception:
            raw(entry["answer"], entry)
            return 0.0

    return score


def entry_of(column: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reasoning-gym item in a row's column, parsed if it is typed JSON text."""
    return typed_json.loads(column) if isinstance(column, str) else column  # type: ignore[no-any-return]


def _says_halted(answer: str, entry: Any) -> bool:
    """Return whether the answer equals the gold answer: the task accepts any text for True, even `False`."""
    return answer.strip().lower() == str(entry["answer"]).lower()


def _is_one_number(answer: str, entry: Any) -> bool:
    """Return whether the only number is the gold answer: the task accepts the first number, without its sign."""
    return {float(number) for number in _SIGNED.findall(answer.replace(",", ""))} == {float(entry["answer"])}


def _uses_the_numbers(answer: str, entry: Any) -> bool:
    """Return whether the row's numbers are used.

    The task accepts any four numbers from 1 to 10, so that 1*2*3*4 solves every row.
    """
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(entry["metadata"]["numbers"])


def _is_the_probability(answer: str, entry: Any) -> bool:
    """Return whether the probability is right.

    The task compares prefixes, so that 0 is always right, and tolerates 0.0001 at any size.
    """
    gold = Fraction(entry["answer"])
    return abs(Fraction(answer.replace(",", "")) - gold) <= min(Fraction(1, 10_000), gold / 100)


def _has_the_numbers(answer: str, entry: Any) -> bool:
    """Return whether the numbers are exact: the task tolerates an error of 1 in each number."""
    found, gold = (json.loads(text.replace("'", '"')) for text in (answer, entry["answer"]))
    return all(abs(float(a) - float(b)) < 1e-6 for a, b in zip(found, gold, strict=True))


def _is_one_fraction(answer: str, _entry: Any) -> bool:
    """Return whether the answer is a single fraction: the task accepts the first of several."""
    return len(re.findall(r"\d+", answer)) == 2


def _has_as_many_words(answer: str, entry: Any) -> bool:
    """Return whether there are no extra words: the task gives full marks to the right words followed by others."""
    return len(answer.split()) <= len(str(entry["answer"]).split())


# Task -> condition that an answer must meet to earn anything; an exception means that it does not.
_CONDITIONS: dict[str, Callable[[str, Any], bool]] = {
    "game_of_life_halting": _says_halted,
    "gsm_symbolic": _is_one_number,
    "puzzle24": _uses_the_numbers,
    "coin_flip": _is_the_probability,
    "number_sorting": _has_the_numbers,
    "fraction_simplification": _is_one_fraction,
    "letter_jumble": _has_as_many_words,
}


def replace_eval(kind: type) -> type:
    """Return a subclass of the task whose methods call `read_literal` in place of `eval` and `exec`."""
    own = {name: _replace_eval_in(method) for name, method in inspect.getmembers(kind, inspect.isfunction)}
    return type(kind.__name__, (kind,), {name: method for name, method in own.items() if method})


def _replace_eval_in(method: types.FunctionType) -> types.FunctionType | None:
    """Copy the function with `read_literal` in place of `eval` and `exec`; None if it calls neither."""
    if not {"eval", "exec"} & _names(method.__code__):
        return None
    scope = {**method.__globals__, "eval": read_literal, "exec": read_literal}
    copy = types.FunctionType(method.__code__, scope, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _names(code: types.CodeType) -> set[str]:
    """Return the global names and attributes that a function and its nested functions use."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def read_literal(text: Any, *_: Any) -> Any:
    """Parse a text as a Python literal. Raises ValueError or SyntaxError for anything else."""
    if not isinstance(text, str) or len(text) > MAX_LITERAL_CHARS:
        raise ValueError(f"no literal, or one of more than {MAX_LITERAL_CHARS:,} characters")
    return ast.literal_eval(text.strip())


def is_formula(text: str, gold: str = "") -> bool:
    """Return whether a text has only numbers, one-letter variables, + - * / ^ ( ) , =, and math functions.

    It must also be small enough to evaluate.

    Names that occur in the gold answer are allowed, too.
    """
    known = FUNCTIONS.union(_NAME.findall(gold))
    names = [name for name in _NAME.findall(text) if not (len(name) == 1 and name != "_")]
    return (
        _CHARACTERS.fullmatch(text) is not None
        and known.issuperset(names)
        and not _ATTRIBUTE.search(text)
        and not too_large("^".join(part.strip() for part in text.split("**")))
    )
