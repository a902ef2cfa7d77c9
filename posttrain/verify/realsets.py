"""Sets of real numbers as unions of intervals: the common form of intervals, inequalities and set-builders."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
from sympy import Abs, Add, Expr, Mul, S, Symbol
from sympy.core.function import AppliedUndef

from posttrain.verify.identity import approximate, same_formula
from posttrain.verify.math_values import Builder, Chain, Formula, Group, NamedSet, Without

MAX_PIECES = 40
_FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "=": "=", "ne": "ne"}
_POSITIVE, _NOT_NEGATIVE = ("R^+", "R_+", "R_gt0"), ("R_ge0", "R^+_0")


@dataclasses.dataclass(frozen=True)
class Bound:
    """An end of an interval.

    value: as a formula. at: as a number, for ordering. closed: whether it belongs to the interval.
    """

    value: Formula
    at: Any
    closed: bool


Piece = tuple[Bound, Bound]
Pieces = tuple[Piece, ...]


def make_bound(value: Formula, closed: bool) -> Bound | None:
    """Make a bound; None if the value is not a real number, or is infinite and closed."""
    expr = value.expr
    if expr in (S.Infinity, S.NegativeInfinity):
        return None if closed else Bound(value, float("inf") if expr is S.Infinity else float("-inf"), False)
    at = approximate(expr, 30) if not expr.free_symbols else None
    return Bound(value, at, closed) if at is not None and at.is_extended_real else None


LOWEST, HIGHEST = (
    Bound(Formula(S.NegativeInfinity), float("-inf"), False),
    Bound(Formula(S.Infinity), float("inf"), False),
)
ALL: Pieces = ((LOWEST, HIGHEST),)


def reals(value: Any) -> tuple[Pieces, str | None] | None:
    """Convert a value to (union of intervals, name of its variable or None); None if it is not such a set."""
    if isinstance(value, Group):
        return _solve_group(value)
    if isinstance(value, NamedSet):
        if value.name == "R":
            return ALL, None
        zero = make_bound(Formula(S.Zero), value.name in _NOT_NEGATIVE)
        known = zero is not None and value.name in (*_POSITIVE, *_NOT_NEGATIVE)
        return (((zero, HIGHEST),), None) if zero is not None and known else None
    if isinstance(value, Without):
        whole, left_out = reals(value.whole), reals(value.left_out)
        return None if whole is None or left_out is None else (meet(whole[0], complement(left_out[0])), whole[1])
    if isinstance(value, Builder):
        found = reals(value.condition)
        named = isinstance(value.element, Formula) and isinstance(value.element.expr, Symbol)
        if found is None or not named or found[1] != value.element.expr.name:
            return None
        domain = (ALL, None) if value.domain is None else reals(value.domain)
        return None if domain is None else (meet(found[0], domain[0]), None)
    return _solve_chain(value) if isinstance(value, Chain) else None


def _solve_group(group: Group) -> tuple[Pieces, str | None] | None:
    if group.kind in ("()", "[]", "[)", "(]"):
        if len(group.members) != 2 or not all(isinstance(member, Formula) for member in group.members):
            return None
        low, high = (make_bound(member, mark in "[]") for member, mark in zip(group.members, group.kind, strict=True))
        return (((low, high),), None) if low is not None and high is not None and low.at < high.at else None
    if group.kind == "set":
        ends = [make_bound(member, True) if isinstance(member, Formula) else None for member in group.members]
        points = [(point, point) for point in ends if point is not None]
        return (union(tuple(points)), None) if len(points) == len(ends) else None
    solutions = [reals(member) for member in group.members]
    if not solutions or any(result is None for result in solutions) or len(solutions) > MAX_PIECES:
        return None
    sets = [result[0] for result in solutions if result is not None]
    names = {result[1] for result in solutions if result is not None}
    if len(names) != 1 or (group.kind == "list" and names == {None} and not _are_intervals(group)):
        return None
    if group.kind == "list" and names == {None}:
        return union(tuple(piece for pieces in sets for piece in pieces)), None
    together = sets[0]
    for pieces in sets[1:]:
        together = meet(together, pieces)
    either = union(tuple(piece for pieces in sets for piece in pieces))
    if group.kind == "union" or (
        group.kind == "list" and (group.joined == "or" or (group.joined == "," and not together))
    ):
        return either, names.pop()
    return (together, names.pop()) if group.kind in ("meet", "list") else None


def _are_intervals(group: Group) -> bool:
    """Return whether a list is of intervals, not points, as in `(-\\infty, 0), (1, \\infty)`: an end is infinite."""
    members = [
        interval.members
        for interval in group.members
        if isinstance(interval, Group) and interval.kind in ("()", "[]", "[)", "(]")
    ]
    ends = [end.expr for pair in members for end in pair if isinstance(end, Formula)]
    return len(members) == len(group.members) and (S.Infinity in ends or S.NegativeInfinity in ends)


def _solve_chain(chain: Chain) -> tuple[Pieces, str | None] | None:
    if chain.modulus is not None:
        return None
    if chain.relations == ("in",):
        found, name = reals(chain.sides[1]), _variable(chain.sides[0])
        return None if found is None or name is None else (found[0], name)
    pieces, variable = ALL, None
    for left, relation, right in zip(chain.sides, chain.relations, chain.sides[1:], strict=False):
        if relation not in _FLIPPED or not (isinstance(left, Formula) and isinstance(right, Formula)):
            return None
        link = _solve_link(left, relation, right)
        if link is None or variable not in (None, link[1]):
            return None
        pieces, variable = meet(pieces, link[0]), link[1]
    return pieces, variable


def _variable(side: Any) -> str | None:
    return side.expr.name if isinstance(side, Formula) and isinstance(side.expr, Symbol) else None


def _solve_link(left: Formula, relation: str, right: Formula) -> tuple[Pieces, str] | None:
    """Solve a relation that is linear in one variable, one f(x), or one |x - a|; None for other relations."""
    if S.Infinity in (left.expr, right.expr) or S.NegativeInfinity in (left.expr, right.expr):
        return _solve_infinite_bound(left, relation, right)
    difference = Add(left.expr, Mul(-1, right.expr))
    approximately = left.approximate or right.approximate
    inner = sorted(difference.atoms(AppliedUndef), key=str) or sorted(difference.atoms(Abs), key=str)
    if len(inner) > 1 or len(difference.free_symbols) != 1:
        return None
    unknown = Symbol(str(inner[0])) if inner else next(iter(difference.free_symbols))
    if inner:
        difference = difference.xreplace({inner[0]: unknown})
        if len(difference.free_symbols) != 1:
            return None
    found = _solve_linear(difference, unknown, relation, approximately)
    if found is None or not inner or not isinstance(inner[0], Abs):
        return None if found is None else (found, unknown.name)
    return _solve_distance(found, inner[0].args[0], approximately)


def _solve_infinite_bound(left: Formula, relation: str, right: Formula) -> tuple[Pieces, str] | None:
    """Return all reals for a vacuous bound such as `-\\infty < x`; None for other relations."""
    if left.expr is S.NegativeInfinity and relation == "lt" and isinstance(right.expr, Symbol):
        return ALL, right.expr.name
    return (
        (ALL, left.expr.name)
        if right.expr is S.Infinity and relation == "lt" and isinstance(left.expr, Symbol)
        else None
    )


def _solve_linear(difference: Expr, unknown: Symbol, relation: str, approximately: bool) -> Pieces | None:
    """Solve a * unknown + b (relation) 0; None if the difference is not linear in the unknown."""
    b = difference.subs(unknown, 0)
    a = sympy.expand(difference.subs(unknown, 1) - b) if difference.count_ops() < 60 else S.NaN
    if not (a.is_real and b.is_real) or a.is_zero or not same_formula(difference, Add(Mul(a, unknown), b)):
        return None
    end = make_bound(Formula(-b / a, approximately), relation in ("le", "ge", "="))
    if end is None:
        return None
    if a.is_negative:
        relation = _FLIPPED[relation]
    if relation == "=":
        return ((end, end),)
    if relation == "ne":
        return ((LOWEST, end), (end, HIGHEST))
    return ((LOWEST, end),) if relation in ("lt", "le") else ((end, HIGHEST),)


def _solve_distance(distances: Pieces, inside: Expr, approximately: bool) -> tuple[Pieces, str] | None:
    """Return the set of x for which |x - a| lies in a set of distances; None if `inside` is not x - a or a - x."""
    if len(inside.free_symbols) != 1:
        return None
    unknown = next(iter(inside.free_symbols))
    slope = sympy.expand(inside - inside.subs(unknown, 0)).coeff(unknown, 1)
    if slope not in (1, -1) or not same_formula(inside, slope * unknown + inside.subs(unknown, 0)):
        return None
    center = -inside.subs(unknown, 0) / slope
    zero = make_bound(Formula(S.Zero), True)
    assert zero is not None
    pieces: list[Piece] = []
    for low, high in meet(distances, ((zero, HIGHEST),)):
        for sign in (1, -1):
            near, far = (
                make_bound(
                    Formula(center + sign * bound.value.expr, approximately or bound.value.approximate), bound.closed
                )
                for bound in (low, high)
            )
            if near is None or far is None:
                return None
            pieces.append((near, far) if sign == 1 else (far, near))
    return union(tuple(pieces)), unknown.name


def union(pieces: Pieces) -> Pieces:
    """Sort the pieces and merge those that overlap or touch."""
    merged: list[Piece] = []
    for low, high in sorted(pieces, key=lambda piece: (piece[0].at, not piece[0].closed)):
        if merged and (
            low.at < merged[-1][1].at or (low.at == merged[-1][1].at and (low.closed or merged[-1][1].closed))
        ):
            last_low, last = merged[-1]
            end = high if (high.at, high.closed) > (last.at, last.closed) else last
            merged[-1] = (last_low, end)
        else:
            merged.append((low, high))
    return tuple(merged)


def meet(one: Pieces, other: Pieces) -> Pieces:
    """Compute the intersection of two sets."""
    pieces = []
    for low, high in one:
        for low2, high2 in other:
            start = max(low, low2, key=lambda end: (end.at, not end.closed))
            end = min(high, high2, key=lambda end: (end.at, end.closed))
            if start.at < end.at or (start.at == end.at and start.closed and end.closed):
                pieces.append((start, end))
    return union(tuple(pieces))


def complement(pieces: Pieces) -> Pieces:
    """Compute the complement of the pieces in the real numbers."""
    gaps, start = [], LOWEST
    for low, high in union(pieces):
        if low.at > start.at or (low.at == start.at and start.closed and not low.closed):
            gaps.append((start, dataclasses.replace(low, closed=not low.closed)))
        start = dataclasses.replace(high, closed=not high.closed)
    if start.at != float("inf"):
        gaps.append((start, HIGHEST))
    return tuple(gaps)
