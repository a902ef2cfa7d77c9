"""What can be said of two values that math-verify has read before it compares them, at a cost bounded by their size.

Importing this imports sympy.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
from sympy import (
    Add,
    Basic,
    Derivative,
    Eq,
    Expr,
    Float,
    Integral,
    Limit,
    Mul,
    Pow,
    Product,
    Set,
    Sum,
    Symbol,
    Tuple,
    Union,
)
from sympy.core.expr import UnevaluatedExpr
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

OPEN = (Sum, Product, Integral, Limit, Derivative)
STEPS = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.sign)  # flat between steps
MOST_OPERATIONS = 250  # of both values together, for what is compared by rearranging
MOST_TERMS = 100  # of a value multiplied out, and members of a list
MOST_PIECES = 10  # intervals
MOST_SYMBOLS = 20
HIGHEST = 6  # power, in an equation that is solved
DIGITS = 20
# Where functions are compared: positive, because rules such as log(ab) = log a + log b hold there, and small, so that
# powers of powers stay so; the last has both signs, for |x| is not x. Variable j of point p lies in (low, low + 0.35).
POINTS = ((0.3, 1), (1.05, 1), (0.4, -1))
_EXACT = Float("1e-12", DIGITS)
_APART = Float("1e-9", DIGITS)
_PROVEN = Float("1e-50", DIGITS)
_NOTHING = Float("1e-15", DIGITS)  # may be 0 after all


def left_open(value: Any) -> bool:
    """Whether a sum, product, integral, limit or derivative is still to be worked out."""
    return isinstance(value, Basic) and value.has(*OPEN)


def with_unit(value: Any) -> Any:
    """The value with the imaginary unit for a free i; the library has a variable, real or not by the blanks around."""
    if not isinstance(value, Basic):
        return value
    real = {s: Symbol(s.name, real=True) for s in value.free_symbols if isinstance(s, Symbol)}
    try:
        return value.xreplace({s: sympy.I if s.name == "i" else one for s, one in real.items()})
    except (TypeError, ValueError):  # no order among complex numbers
        return value


def false_equation(value: Any) -> bool:
    """Whether it says 6 = 5 somewhere. Decimals may be rounded to two digits: 50/3 = 16.67 is no lie."""
    for one in value.atoms(Eq) if isinstance(value, Basic) else ():
        if not one.free_symbols and not one.has(UnevaluatedExpr, *OPEN):
            left, right = number(one.lhs), number(one.rhs)
            slack = 0.01 if one.has(Float) else _APART
            if left is not None and right is not None and not _close(left, right, slack):
                return True
    return False


def number(value: Any, at: dict[Symbol, Float] | None = None, digits: int = DIGITS) -> Any:
    """The finite number that an expression is; None if it is none."""
    try:
        found = value.evalf(digits, subs=at, maxn=4 * digits)
        return found if found.is_number and found.is_finite and not found.has(AppliedUndef, *OPEN) else None
    except Exception:  # what sympy raises where a function is not defined has many names
        return None


def unwrapped(gold: Any, candidate: Any) -> tuple[Any, Any]:
    """Both, without the `x =` that one of them has. As the library: of a gold only if nothing else stands before it."""
    if isinstance(candidate, Eq) and isinstance(gold, Expr):
        return gold, candidate.rhs
    if isinstance(gold, Eq) and isinstance(gold.lhs, Symbol) and isinstance(candidate, Expr):
        return gold.rhs, candidate
    return gold, candidate


def decided(gold: Any, candidate: Any, decimals: int) -> bool | None:
    """Equal or not, where numbers say so: the values, or those of both functions at POINTS. None: they do not.

    Functions that differ at a positive point are not equal; those without steps that agree at every point are.
    """
    both = (gold, candidate)
    if not all(isinstance(one, Expr) for one in both) or any(isinstance(one, Symbol) for one in both):
        return None
    if any(one.has(AppliedUndef, *OPEN) for one in both):
        return None
    free = _symbols(*both)
    if not free:
        return _numbers(gold, candidate, decimals)
    if any(one.has(UnevaluatedExpr) for one in both) or len(free) > MOST_SYMBOLS:
        return None
    agreed = True
    for at, positive in _points(free):
        x, y = (number(one, at) for one in both)
        same = x is not None and y is not None and _close(x, y, _APART)
        if not same and positive and x is not None and y is not None:
            return False
        agreed = agreed and same
    return True if agreed and not any(one.has(*STEPS) for one in both) else None


def _symbols(*values: Any) -> list[Symbol]:
    return sorted(set().union(*(one.free_symbols for one in values)), key=lambda s: (s.name, str(s.assumptions0)))


def _points(free: list[Symbol]) -> list[tuple[dict[Symbol, Float], bool]]:
    """Where functions of these are compared, and whether all of it is positive."""
    steps = [0.35 * math.modf(0.618034 * j)[0] for j in range(1, len(free) + 1)]
    return [
        (
            {s: Float(sign ** (j + 1) * (low + step)) for j, (s, step) in enumerate(zip(free, steps, strict=True))},
            sign > 0,
        )
        for low, sign in POINTS
    ]


def related(gold: Any, candidate: Any) -> bool | None:
    """Of equations and inequalities, beside each other or a set: whether they are the same. None: to be solved.

    Two equations are, where the differences of their sides are multiples of each other. What is neither so nor small
    enough to be solved is not the same.
    """
    both = (gold, candidate)
    if not any(isinstance(one, Boolean) for one in both) or not all(
        isinstance(one, Boolean | Set | Tuple) for one in both
    ):
        return None
    sides = [side for one in both if isinstance(one, Eq) for side in one.args]
    if (
        len(sides) == 4
        and all(isinstance(side, Expr) for side in sides)
        and 0 < len(free := _symbols(*both)) <= MOST_SYMBOLS
    ):
        ratios = []
        for at, _ in _points(free):
            left, right = (number(Add(one.lhs, Mul(-1, one.rhs, evaluate=False), evaluate=False), at) for one in both)
            ratios.append(None if left is None or not right else left / right)
        if None not in ratios and all(_close(ratio, ratios[0], _APART) for ratio in ratios):
            return True
    return None if all(_soluble(one) for one in both) else False


def _soluble(value: Any) -> bool:
    """Whether the equations and inequalities in it are of low degree, without roots of roots or powers like x^x."""
    if not value.has(Boolean):
        return True
    powers = [one for one in value.atoms(Pow) if one.free_symbols]
    roots = [one for one in powers if not one.exp.is_Integer and not one.exp.free_symbols]
    return (
        _operations(value) <= MOST_OPERATIONS // 4
        and all(not (one.base.free_symbols and one.exp.free_symbols) for one in powers)
        and all(abs(one.exp) <= HIGHEST for one in powers if one.exp.is_Integer)
        and len(roots) <= 2
        and not any(one.base.has(*roots) for one in roots)
    )


def _numbers(gold: Expr, candidate: Expr, decimals: int) -> bool | None:
    both = (gold, candidate)
    exact = not any(one.has(Float) for one in both)
    if exact and any(one.has(UnevaluatedExpr) for one in both):
        return None  # 9% = 9
    if exact and all(one.is_rational for one in both):
        one, other = (value.doit() for value in both)
        if one.is_Rational and other.is_Rational:
            return bool(one == other)
    x, y = (number(one) for one in both)
    if x is None or y is None:
        return None
    if not exact:
        return _close(x, y, _EXACT) or _rounded(x, y, decimals)
    if min(abs(x), abs(y)) < _NOTHING:
        return None if max(abs(x), abs(y)) < _NOTHING else False
    if _close(x, y, _APART):
        x, y = (number(one, digits=3 * DIGITS) for one in both)
        return x is not None and y is not None and _close(x, y, _PROVEN)
    return False


def _rounded(x: Any, y: Any, decimals: int) -> bool:
    """The same after rounding. Of numbers that rounding leaves a digit or two of, within a hundredth too."""
    if (x.round(decimals) - y.round(decimals)) != 0:
        return False
    return max(abs(x), abs(y)) >= 10.0 ** (2 - decimals) or _close(x, y, 0.01)


def _close(x: Any, y: Any, share: Any) -> bool:
    return bool(abs(x - y) <= share * max(abs(x), abs(y)))


def too_many(*values: Any) -> bool:
    """Whether comparing them by rearranging, multiplying out or solving may take more than moments."""
    known = [value for value in values if isinstance(value, Basic)]
    if any(len(value.args) > (MOST_PIECES if isinstance(value, Union) else MOST_TERMS) for value in known):
        return True
    return (
        sum(_operations(value) for value in known) > MOST_OPERATIONS or max(map(_terms, known), default=0) > MOST_TERMS
    )


def _operations(value: Basic) -> int:
    """sympy counts those of a set by walking through its members, and the integers have no end."""
    if isinstance(value, Expr):
        return int(sympy.count_ops(value))
    return 1 + sum(_operations(one) for one in value.args if isinstance(one, Basic))


def _terms(value: Any) -> float:
    """Bound on the number of terms of an expression that is multiplied out; of anything else, of its largest part."""
    below = [_terms(one) for one in value.args if isinstance(one, Basic)]
    if isinstance(value, Pow) and value.exp.is_Integer:
        # Of the powers of one number nothing is multiplied out.
        size, power = below[0], abs(int(value.exp))
        return (
            math.comb(int(size) + power - 1, power)
            if 1 < size < 100 and power < 1000
            else size**power
            if size > 1
            else 1.0
        )
    if isinstance(value, Mul):
        return math.prod(below)
    return float(sum(below)) if isinstance(value, Add) else max(below, default=1.0)
