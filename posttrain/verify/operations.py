"""Sums, products and unions of what was read; what has none of them is unreadable."""

from __future__ import annotations

from typing import Any

from sympy import Add, Expr, Mul, Pow, S, Symbol

from posttrain.verify.values import Group, Unreadable

INFINITE = (S.Infinity, S.NegativeInfinity)


def add(left: Any, right: Any) -> Expr:
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        raise Unreadable("a sum of no numbers")
    if left in INFINITE or right in INFINITE:
        raise Unreadable("a sum with infinity")
    return Add(left, right)


def times(left: Any, right: Any) -> Expr:
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        raise Unreadable("a product of no numbers")
    if (left in INFINITE or right in INFINITE) and S.NegativeOne not in (left, right):
        raise Unreadable("a product with infinity")
    return Mul(left, right)


def negative(value: Any) -> Expr:
    return times(S.NegativeOne, value)


def reciprocal(value: Any) -> Expr:
    if not isinstance(value, Expr) or value == 0:
        raise Unreadable("a quotient of no numbers")
    return Pow(value, -1)


def joined(kind: str, left: Any, right: Any) -> Any:
    if isinstance(left, Symbol) and isinstance(right, Symbol):
        return Symbol(f"{left.name} {kind} {right.name}")
    if isinstance(left, Expr) or isinstance(right, Expr):
        raise Unreadable("a union of no sets")
    return Group(kind, (*(left.members if isinstance(left, Group) and left.kind == kind else (left,)), right))
