"""Meaning of relations in an answer: the value they state, and whether they are false."""

from __future__ import annotations

from typing import Any

from sympy import Abs, Expr, Float, Mul, Pow, Symbol, pi
from sympy.core.function import AppliedUndef

from posttrain.verify.identity import approximate, same_formula
from posttrain.verify.math_values import Chain, Formula, Group, formulas, letters_of
from posttrain.verify.units import ratio_of_units

PAIRED = ("()", "<>")


def has_false_claim(value: Any) -> bool:
    """Return whether the value contains a false equation such as 6 = 5.

    Decimals may be rounded to two digits: 50/3 = 16.67 is accepted.
    """
    if isinstance(value, Group):
        return any(map(has_false_claim, value.members))
    if not isinstance(value, Chain):
        return False
    last = value.sides[0]  # the latest number in the chain
    for relation, side in zip(value.relations, value.sides[1:], strict=True):
        if relation in ("=", "equiv") and _differ(last, side, value.modulus):
            return True
        if relation == "approx" and is_number(last) and is_number(side) and not _near(last, side):
            return True
        last = side if is_number(side) or relation not in ("=", "equiv") or not is_number(last) else last
    return False


def _near(left: Any, right: Any) -> bool:
    """Return whether the right number may be the left one rounded: within 1%, or 0.5 for an integer."""
    ratio = 1 if left.unit.startswith("%") != right.unit.startswith("%") else ratio_of_units(left.unit, right.unit)
    x, y = approximate(left.expr), approximate(right.expr * (ratio or 1))
    if ratio is None or x is None or y is None:
        return False
    whole = right.expr.is_Integer and not left.expr.is_Integer
    return close(x, y, Float("0.01")) or (whole and bool(abs(x - y) <= Float("0.5")))


def _differ(left: Any, right: Any, modulus: Formula | None) -> bool:
    """Return whether two numbers stated as equal (or congruent) are not."""
    if not (is_number(left) and is_number(right)):
        return False
    if {left.unit, right.unit} in ({"°", ""}, {"°", "radians"}):  # 90 degrees are 90, and pi/2
        turned = [Mul(side.expr, pi / 180) if side.unit == "°" else side.expr for side in (left, right)]
        return not same_formula(*turned) and not same_formula(left.expr, right.expr)
    if modulus is not None:
        return not congruent(left, right, modulus)
    if left.unit.startswith("%") != right.unit.startswith("%"):
        ratio: Any = 1
    else:
        ratio = ratio_of_units(left.unit, right.unit)
    if ratio is None:
        return True
    if left.approximate or right.approximate:
        x, y = approximate(left.expr), approximate(right.expr * ratio)
        return x is None or y is None or not close(x, y, Float("0.01"))
    return not same_formula(left.expr, right.expr * ratio)


def _is_remainder(value: Any, modulus: Any) -> bool:
    """Return whether the value lies between 0 and the modulus: 42 modulo 5 is not reduced."""
    if not (is_number(value) and is_number(modulus)):
        return False
    return bool(value.expr.is_Integer and modulus.expr.is_Integer and 0 <= value.expr < modulus.expr)


def congruent(one: Formula, other: Formula, modulus: Formula) -> bool:
    """Return whether two integers differ by a multiple of the modulus; False for anything else."""
    whole = all(value.expr.is_Integer for value in (one, other, modulus)) and modulus.expr != 0
    return bool(whole and (one.expr - other.expr) % modulus.expr == 0)


def close(x: Any, y: Any, share: Any) -> bool:
    """Return whether x and y differ by at most this share of the larger absolute value."""
    return bool(abs(x - y) <= share * max(abs(x), abs(y)))


def is_name(side: Any) -> bool:
    """Return whether a side of an equation only names the unknown: x, f(2), |AB|, (x, y), AB : CD."""
    if isinstance(side, Group):
        return side.kind in PAIRED and all(
            isinstance(member, Formula) and isinstance(member.expr, Symbol) for member in side.members
        )
    if not isinstance(side, Formula):
        return False
    expr = side.expr
    if isinstance(expr, Symbol | AppliedUndef):
        return True
    if isinstance(expr, Abs):
        return _is_segment_product(expr.args[0])
    return _is_segment_product(expr) and bool(expr.free_symbols)


def _is_segment_product(expr: Expr) -> bool:
    """Return whether the formula is a product or quotient of capitalized names, as for segments and areas."""
    parts = Mul.make_args(expr)
    bases = [factor.base if isinstance(factor, Pow) and factor.exp == -1 else factor for factor in parts]
    bases = [part for base in bases for part in Mul.make_args(base)]
    return all(isinstance(base, Symbol) and base.name[0].isupper() for base in bases)


def named_value(chain: Chain) -> Any:
    """Return b of a gold answer `x = b` with a name on the left, or of `b mod m`; None for other relations."""
    if chain.modulus is not None or chain.relations == ("in",):
        return stated_value(chain)
    if not set(chain.relations) <= {"=", "approx", "equiv"} or not is_name(chain.sides[0]):
        return None
    return stated_value(chain)


def stated_value(chain: Chain) -> Any:
    """Return the value that a chain of equations arrives at: its last side, or the side before the first `\\approx`.

    The first side must be a name, a number, or a formula of several variables, because `2x = 10` does not state x.
    Returns None otherwise.
    """
    if chain.modulus is not None:
        named = is_name(chain.sides[0]) or is_number(chain.sides[0])
        return chain.sides[-1] if named and _is_remainder(chain.sides[-1], chain.modulus) else None
    if chain.relations == ("in",):
        return chain.sides[1] if is_name(chain.sides[0]) and not is_number(chain.sides[1]) else None
    if not set(chain.relations) <= {"=", "approx", "equiv"}:
        return None
    sides = list(chain.sides)
    if "approx" in chain.relations:
        sides = sides[: chain.relations.index("approx") + 1]
        if len(sides) == 1 and is_name(sides[0]):  # x \approx a = b has the value b
            relations = [*chain.relations[1:], "approx"]
            sides = list(chain.sides[: relations.index("approx") + 2])
    first, last = sides[0], sides[-1]
    later = [formula.expr for side in sides[1:] for formula in formulas(side)]
    unknown = first.expr if isinstance(first, Formula) and isinstance(first.expr, Symbol | AppliedUndef) else None
    if unknown is not None and any(expr.has(unknown) for expr in later):
        return None  # x = 3x
    if len(sides) == 2 and isinstance(last, Formula) and isinstance(last.expr, Symbol) and not letters_of(first):
        return first
    if len(sides) == 1 or is_name(first):
        return last
    if is_number(first):
        return last if is_number(last) else None
    return last if isinstance(first, Formula) and len(letters_of(first)) > 1 else None


def is_number(side: Any) -> bool:
    """Return whether the side is a formula without variables and unknown functions."""
    return isinstance(side, Formula) and not side.expr.free_symbols and not side.expr.has(AppliedUndef)
