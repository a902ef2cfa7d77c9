"""Equality test of two formulas, as numbers or as functions. Work is bounded by the size of the formulas.

Numbers: exact if rational, else to a number of digits that grows with the digits in the formulas. Rational functions:
modulo a large prime at random points (an identity of polynomials holds there; a non-identity passes with probability
degree / 2^61 per point). Other functions: as real functions at many points of both signs and several sizes where both
are defined, to as many digits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from typing import Any

import mpmath
import sympy
from sympy import Add, Expr, Float, I, Integer, Mul, Pow, Rational, Symbol
from sympy.core.function import AppliedUndef

PRIME = 2**61 - 1
TRIALS = 3  # random points for rational functions
DIGITS = 50
MAX_DIGITS = 400
MAX_SYMBOLS = 20
MAX_NODES = 1500  # of both formulas, for functions compared at points
MIN_POINTS = 4  # minimum number of points where both functions are defined
_STEPS = (sympy.Abs, sympy.floor, sympy.ceiling, sympy.sign, sympy.Max, sympy.Min)


def same_formula(one: Expr, other: Expr) -> bool:
    """Return whether two formulas are the same number or the same function of their variables."""
    if one == other:
        return True
    free = one.free_symbols | other.free_symbols
    if not free and not (one.has(AppliedUndef) or other.has(AppliedUndef)):
        return same_number(one, other)
    if len(free) > MAX_SYMBOLS:
        return False
    if (same := _same_rational(one, other, free)) is not None:
        return same
    return _same_at_points(one, other, free)


def same_number(one: Expr, other: Expr) -> bool:
    """Return whether two formulas without variables are the same number."""
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    if not (one.is_finite is not False and other.is_finite is not False):
        return bool(one == other)
    x, y = approximate(one, 15), approximate(other, 15)
    if x is None or y is None or abs(x - y) > Float("1e-9") * (abs(x) + abs(y)) + Float("1e-30"):
        return False
    digits = digits_needed(one, other)
    x, y = approximate(one, digits), approximate(other, digits)
    if x is None or y is None:
        return False
    slack = Float(10, digits) ** (12 - digits)
    size = max(abs(x), abs(y))
    return bool(abs(x - y) <= slack * size) or bool(size < slack)


def digits_needed(*formulas: Expr) -> int:
    """Return DIGITS plus the number of digits written in the formulas, at most MAX_DIGITS."""
    written = sum(len(str(number.p)) + len(str(number.q)) for formula in formulas for number in formula.atoms(Rational))
    return min(DIGITS + written, MAX_DIGITS)


@functools.lru_cache(maxsize=4096)
def approximate(value: Expr, digits: int = 20) -> Any:
    """Evaluate an expression without variables numerically; None if it is not a finite number."""
    try:
        found = value.evalf(digits, maxn=4 * digits)
        return found if found.is_number and found.is_finite and not found.has(AppliedUndef) else None
    except Exception:  # sympy raises many exception types for undefined functions
        return None


# Rational functions, exactly.


class _NotRational(Exception):
    pass


class _Undefined(Exception):
    pass


def _same_rational(one: Expr, other: Expr, free: set[Symbol]) -> bool | None:
    """Compare rational functions with rational coefficients; return None for other functions."""
    draw = random.Random(len(free))
    order = sorted(free, key=str)
    agreed = 0
    for _ in range(4 * TRIALS):
        at = {symbol: draw.randrange(2, PRIME) for symbol in order}
        try:
            if _residue(one, at) != _residue(other, at):
                return False
        except _Undefined:
            continue
        except _NotRational:
            return None
        agreed += 1
        if agreed == TRIALS:
            return True
    return False


def _residue(value: Expr, at: dict[Symbol, int]) -> int:
    """Evaluate the formula modulo PRIME with the given residues for its variables."""
    if isinstance(value, Symbol):
        return at[value]
    if isinstance(value, Rational):
        return int(value.p) * _inverse(int(value.q)) % PRIME
    if isinstance(value, Add):
        return sum(_residue(part, at) for part in value.args) % PRIME
    if isinstance(value, Mul):
        found = 1
        for part in value.args:
            found = found * _residue(part, at) % PRIME
        return found
    if isinstance(value, Pow) and value.exp.is_Integer:
        base, power = _residue(value.base, at), int(value.exp)
        return pow(base, power, PRIME) if power >= 0 else pow(_inverse(base), -power, PRIME)
    raise _NotRational


def _inverse(number: int) -> int:
    if number % PRIME == 0:
        raise _Undefined
    return pow(number, -1, PRIME)


# Other functions, at points.


def _same_at_points(one: Expr, other: Expr, free: set[Symbol]) -> bool:
    if sum(1 for value in (one, other) for _ in sympy.preorder_traversal(value)) > MAX_NODES:
        return False
    complex_too = one.has(I) or other.has(I)
    digits = digits_needed(one, other)
    agreed = 0
    with mpmath.workdps(digits + 10):
        slack = mpmath.mpf(10) ** (20 - digits)
        for at in _points(one, other, sorted(free, key=str)):
            x, y = _value(one, at, not complex_too), _value(other, at, not complex_too)
            if x is None or y is None:
                continue
            if abs(x - y) > slack * max(abs(x), abs(y)) and max(abs(x), abs(y)) > slack:
                return False
            agreed += 1
    return agreed >= MIN_POINTS


def _points(one: Expr, other: Expr, order: list[Symbol]) -> list[dict[Symbol, Any]]:
    """Choose values for the variables at which the formulas are compared.

    Small and large values of both signs, integers, and values around and beyond the numbers in the formulas, where
    functions with steps and corners change.
    """
    draw = random.Random(1)
    sizes = [0.31, 0.87, 0.62, -0.17, 1.43, -0.53, -1.9, 3.7, -6.3, 17.9]
    rows = [[size * draw.uniform(0.9, 1.1) for _ in order] for size in sizes]
    rows += [[draw.choice((-1, 1)) * abs(value) for value in row] for row in rows if len(order) > 1]
    rows += [[draw.randint(low, low + 3) for _ in order] for low in (2, 3, 5, 9)]
    if one.has(*_STEPS) or other.has(*_STEPS) or _has_even_root(one) or _has_even_root(other):
        corners = _corners(one, other)
        for position, corner in itertools.product(range(len(order)), corners):
            row = [draw.uniform(-3, 3) for _ in order]
            row[position] = corner
            rows.append(row)
        rows += [[draw.choice(corners) for _ in order] for _ in range(20) if len(order) > 1]
    return [{symbol: mpmath.mpf(value) for symbol, value in zip(order, row, strict=True)} for row in rows]


def _has_even_root(value: Expr) -> bool:
    return any(power.exp.is_Rational and power.exp.q % 2 == 0 for power in value.atoms(Pow))


def _corners(one: Expr, other: Expr) -> list[float]:
    """Return values around the numbers of both formulas and their quotients, and beyond all their products."""
    numbers = sorted({abs(float(n)) for value in (one, other) for n in value.atoms(Rational) if 0 < abs(n) < 10**15})[
        :6
    ]
    near = {a * b for a in (1.0, *numbers) for b in (1.0, *(1 / n for n in numbers))}
    points = [sign * point * (1 + shift) for point in sorted(near)[:24] for shift in (-0.07, 0.07) for sign in (1, -1)]
    beyond = 3.3
    for number in numbers:
        beyond *= max(number, 1 / number, 1.0) ** 2
    return [*points, beyond, -beyond]


_FUNCTIONS = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "asin": mpmath.asin, "acos": mpmath.acos, "atan": mpmath.atan, "acot": mpmath.acot, "asec": mpmath.asec,
    "acsc": mpmath.acsc, "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "coth": mpmath.coth,
    "sech": mpmath.sech, "csch": mpmath.csch, "asinh": mpmath.asinh, "acosh": mpmath.acosh, "atanh": mpmath.atanh,
    "acoth": mpmath.acoth, "exp": mpmath.exp, "log": mpmath.log, "Abs": abs, "gamma": mpmath.gamma,
    "factorial": mpmath.factorial, "binomial": mpmath.binomial, "floor": mpmath.floor, "ceiling": mpmath.ceil,
    "sign": mpmath.sign,
    "Max": max, "Min": min, "re": mpmath.re, "im": mpmath.im, "conjugate": mpmath.conj, "arg": mpmath.arg,
}  # fmt: skip


def _value(value: Expr, at: dict[Symbol, Any], real: bool) -> Any:
    """Evaluate the formula at a point to the working precision; None if a part is undefined, too large or not real."""
    try:
        found = _evaluate(value, at, real)
        return found if mpmath.isfinite(found) else None
    except (ArithmeticError, ValueError, TypeError, KeyError, NotImplementedError, mpmath.libmp.NoConvergence):
        return None


def _evaluate(value: Expr, at: dict[Symbol, Any], real: bool) -> Any:
    if isinstance(value, Symbol):
        return at[value]
    if isinstance(value, Rational):
        return mpmath.mpf(int(value.p)) / int(value.q)
    if isinstance(value, Add):
        return mpmath.fsum(_evaluate(part, at, real) for part in value.args)
    if isinstance(value, Mul):
        return mpmath.fprod(_evaluate(part, at, real) for part in value.args)
    if isinstance(value, Pow):
        if isinstance(value.exp, Integer):
            return _evaluate(value.base, at, real) ** int(value.exp)
        return _if_real(mpmath.power(_evaluate(value.base, at, real), _evaluate(value.exp, at, real)), real)
    if value is sympy.pi:
        return +mpmath.pi
    if value is sympy.E:
        return +mpmath.e
    if value is I:
        return mpmath.mpc(0, 1)
    values = [_evaluate(part, at, real) for part in value.args]
    if isinstance(value, AppliedUndef):
        return _unknown_function_value(value.func.__name__, values)
    name = type(value).__name__
    if name in ("Max", "Min", "floor", "ceiling", "sign") and any(abs(mpmath.im(number)) > 0 for number in values):
        raise ValueError("no order")
    if name in ("exp", "sinh", "cosh", "sech", "csch", "gamma", "factorial") and abs(values[0]) > 10**5:
        raise OverflowError
    return _if_real(_FUNCTIONS[name](*values), real)


def _if_real(value: Any, real: bool) -> Any:
    if real and isinstance(value, mpmath.mpc):
        if value.imag != 0:
            raise ValueError("not real")
        return value.real
    return value


def _unknown_function_value(name: str, values: list[Any]) -> Any:
    """Return a pseudorandom number for an unknown function, equal for equal arguments."""
    text = name + ",".join(mpmath.nstr(mpmath.mpmathify(argument), 20) for argument in values)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return mpmath.mpf(seed) / 2**63 + mpmath.mpf("0.1")
