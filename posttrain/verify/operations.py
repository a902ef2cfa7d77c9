"""Sums, products and unions of parsed values; unsupported operands raise Unreadable."""

from __future__ import annotations

import dataclasses
from typing import Any

from sympy import Add, Expr, Float, Mul, Pow, Rational, S, Symbol

from posttrain.verify.math_values import Grid, Group, Unreadable
from posttrain.verify.primality import skip_large_primality_tests

skip_large_primality_tests()

DEGREE = Symbol("°")
INFINITE = (S.Infinity, S.NegativeInfinity)
MAX_RADICAND_DIGITS = 120  # digits of a radicand, which sympy factors
MAX_EXPONENT = 10**6
MAX_ARGUMENT = Float("1e10000", 15)  # of a function


def add(left: Any, right: Any) -> Expr:
    """Return left + right for two finite numbers. Raises Unreadable for anything else."""
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        raise Unreadable("a sum of no numbers")
    if left in INFINITE or right in INFINITE:
        raise Unreadable("a sum with infinity")
    return Add(left, right)


def times(left: Any, right: Any) -> Any:
    """Return left * right for two numbers, or a number and a matrix. Raises Unreadable for anything else."""
    for number, grid in ((left, right), (right, left)):
        if isinstance(grid, Grid) and isinstance(number, Expr):
            rows = (tuple(dataclasses.replace(cell, expr=Mul(number, cell.expr)) for cell in row) for row in grid.rows)
            return Grid(tuple(rows))
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        raise Unreadable("a product of no numbers")
    if (left in INFINITE or right in INFINITE) and S.NegativeOne not in (left, right):
        raise Unreadable("a product with infinity")
    return Mul(left, right)


def raised_to(base: Any, exponent: Any) -> Expr:
    """Return base ** exponent if sympy evaluates it quickly whatever the numbers.

    Raises Unreadable for other powers, and for operands that are not numbers.
    """
    if not (isinstance(base, Expr) and isinstance(exponent, Expr)):
        raise Unreadable("a power of no number")
    if base == 0 and exponent.is_nonpositive:
        raise Unreadable("zero to the power of zero")
    if not exponent.is_Integer and any(map(is_long, (*base.atoms(Rational), *exponent.atoms(Rational)))):
        raise Unreadable("a root of a long number")
    if exponent.is_Rational and abs(exponent) > MAX_EXPONENT and base not in (S.One, S.NegativeOne, S.Zero):
        raise Unreadable("a power that is too large")
    if not exponent.is_Rational and is_beyond(exponent, MAX_EXPONENT):
        raise Unreadable("a power that is too large")
    return Pow(base, exponent)


def is_beyond(value: Expr, limit: Any) -> bool:
    """Return whether a number exceeds a limit: e^{e^{99999}} cannot be evaluated in a short time."""
    if value.free_symbols or not value.is_number:
        return False
    size = abs(value.evalf(5))
    return not size.is_number or bool(size > limit)


def is_long(number: Any) -> bool:
    """Return whether a rational number has so many digits that sympy would factor it for seconds."""
    return max(abs(int(number.p)), int(number.q)) >= 10**MAX_RADICAND_DIGITS


def negative(value: Any) -> Expr:
    """Return -value for a number or a matrix. Raises Unreadable for anything else."""
    return times(S.NegativeOne, value)


def reciprocal(value: Any) -> Expr:
    """Return 1 / value for a nonzero number. Raises Unreadable for anything else."""
    if not isinstance(value, Expr) or value == 0:
        raise Unreadable("a quotient of no numbers")
    return Pow(value, -1)


def apply_operator(kind: str, left: Any, right: Any) -> Any:
    """Return the unevaluated union or intersection (`kind`) of two sets. Raises Unreadable for a number."""
    if isinstance(left, Symbol) and isinstance(right, Symbol):
        mark = f" {kind} "
        return Symbol(mark.join(sorted((*left.name.split(mark), right.name))))
    if isinstance(left, Expr) or isinstance(right, Expr):
        raise Unreadable("a union of no sets")
    return Group(kind, (*(left.members if isinstance(left, Group) and left.kind == kind else (left,)), right))
