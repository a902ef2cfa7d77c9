"""Comparison of two parsed values by kind. Values that are not shown to be equal are different."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
from sympy import Add, Expr, Float, Mul, S, Symbol
from sympy.core.function import AppliedUndef

from posttrain.verify.claims import (
    PAIRED,
    close,
    congruent,
    has_false_claim,
    is_name,
    is_number,
    named_value,
    stated_value,
)
from posttrain.verify.identity import approximate, same_formula
from posttrain.verify.math_values import (
    Builder,
    Chain,
    Formula,
    Grid,
    Group,
    NamedSet,
    Value,
    Without,
    forms_of,
    formulas,
    letters_of,
    walk,
)
from posttrain.verify.realsets import Pieces, reals
from posttrain.verify.record_lists import (
    BARE,
    as_tuple,
    bare_value,
    has_names,
    names_of,
    only_member,
    records,
    split_tuple_equation,
)
from posttrain.verify.units import ratio_of_units, words_beside

_EXACT = Float("1e-12")
MAX_MEMBERS = 60  # members of an unordered list, which are compared pairwise
MAX_OPERATIONS = 150  # operations of an equation whose denominators are cleared


def same(gold: Value, candidate: Value, decimals: int) -> bool:
    """Return whether the candidate equals the gold answer and leaves no further form unevaluated."""
    if forms_of(candidate) - forms_of(gold):
        return False
    if find_condition_words(gold) != find_condition_words(candidate):
        return False
    gold, candidate = unify_case(gold, candidate)
    return Comparison(decimals).same(only_member(gold, gold=True), only_member(candidate))


def find_condition_words(value: Any) -> set[str]:
    """Return the words that describe a variable and are no unit: `odd` in `n odd` and in `n > 2 odd`."""
    about = [
        node
        for part in walk(value)
        if isinstance(part, Builder)
        or (isinstance(part, Chain) and not set(part.relations) <= {"=", "approx", "equiv"})
        or (isinstance(part, Formula) and part.expr.is_Symbol)
        for node in formulas(part)
    ]
    return set().union(*(words_beside(node.unit) for node in about if node.unit))


def to_coordinates(value: Any) -> Any:
    """Convert `2i - 3j + k` in unit vectors to the tuple of its coordinates; return any other value unchanged."""
    units = [Symbol(f"hat {letter}") for letter in "ijk"]
    if not isinstance(value, Formula) or not value.expr.free_symbols & set(units):
        return value
    parts = [sympy.diff(value.expr, unit) for unit in units]
    if any(part.has(*units) for part in parts) or not value.expr.subs(dict.fromkeys(units, 0)).is_zero:
        return value
    shown = parts if units[2] in value.expr.free_symbols else parts[:2]
    return Group("()", tuple(dataclasses.replace(value, expr=part) for part in shown))


def unify_case(*values: Any) -> tuple[Any, ...]:
    """Lowercase the letters that differ between two values only by case.

    Values are unchanged if one of them uses a letter in both cases.
    """
    one, other = names = [letters_of(value) for value in values]
    changed = {
        name
        for name in one ^ other
        if len(name.partition("_")[0].rstrip("'"))
        == 1  # case distinguishes Greek letters: a density is not a distribution
        and name.casefold() in {n.casefold() for n in (other if name in one else one)}
    }
    if not changed or any(len({n.casefold() for n in used}) < len(used) for used in names):
        return values
    change = {Symbol(name): Symbol(name.casefold()) for name in changed}
    return tuple(
        map_formulas(value, lambda f: dataclasses.replace(f, expr=f.expr.xreplace(change))) for value in values
    )


def map_formulas(value: Any, change: Callable[[Formula], Formula]) -> Any:
    """Return the value with `change` applied to every formula in it."""
    if isinstance(value, Formula):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_formulas(member, change) for member in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_formulas(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


class Comparison:
    """Comparison of values with one rounding precision."""

    def __init__(self, decimals: int) -> None:
        self.decimals = decimals

    def same(self, gold: Any, candidate: Any) -> bool:
        gold, candidate = split_tuple_equation(gold), split_tuple_equation(candidate)
        if isinstance(gold, Group | Grid) != isinstance(candidate, Group | Grid):
            gold, candidate = to_coordinates(gold), to_coordinates(candidate)
        if isinstance(gold, Formula) and isinstance(candidate, Formula):
            return self.formulas(gold, candidate)
        if isinstance(gold, Chain) and all(map(is_number, gold.sides)) and not (gold.modulus or has_false_claim(gold)):
            stated = stated_value(gold)  # of a gold such as \log_2 32 = 5, or 40/3 \approx 13.33
            if stated is not None:
                return self.same(stated, candidate) or (
                    "approx" in gold.relations and self.same(gold.sides[-1], candidate)
                )
        if isinstance(gold, Chain) and isinstance(candidate, Chain):
            alike = not _name_different_units(gold.sides, candidate.sides)  # the solutions of `sets` have no units
            return self.chains(gold, candidate) or (alike and self.sets(gold, candidate))
        if isinstance(candidate, Chain):
            stated = only_member(stated_value(candidate))
            return (stated is not None and self.same(gold, stated)) or self.sets(gold, candidate)
        if isinstance(gold, Chain):
            named = only_member(named_value(gold))
            return (named is not None and self.same(named, candidate)) or self.sets(gold, candidate)
        if isinstance(gold, Grid) or isinstance(candidate, Grid):
            return self.grids(gold, candidate)
        if type(gold) is type(candidate) and isinstance(gold, NamedSet | Builder | Without) and gold == candidate:
            return True
        if isinstance(gold, Builder) and isinstance(candidate, Builder) and self.builders(gold, candidate):
            return True
        if isinstance(gold, Group) and isinstance(candidate, Group) and self.groups(gold, candidate):
            return True
        return self.sets(gold, candidate)

    # Numbers and functions.

    def formulas(self, gold: Formula, candidate: Formula) -> bool:
        """Return whether the values are equal in the gold's unit.

        A percentage of at least 1% also equals its number of hundredths.
        """
        ratio = ratio_of_units(gold.unit.removeprefix("%").strip(), candidate.unit.removeprefix("%").strip())
        percents = [value.unit.startswith("%") for value in (gold, candidate)]
        if ratio is None or (percents[0] != percents[1] and gold.unit and candidate.unit):
            return False
        approximately = gold.approximate or candidate.approximate
        pairs = [(gold.expr, candidate.expr * ratio)]
        for one, other in ((gold, candidate), (candidate, gold)):
            if one.unit.startswith("%") and not other.unit and one.expr.is_number and abs(100 * one.expr) >= 1:
                hundred = tuple(100 * value.expr if value is one else value.expr for value in (gold, candidate))
                pairs.append(hundred)  # type: ignore[arg-type]
        for value in (candidate, gold):  # 60 degrees are pi/3, which needs no unit
            if value.unit == "°" and {gold.unit, candidate.unit} == {"°", ""}:
                turned = [
                    formula.expr * sympy.pi / 180 if formula is value else formula.expr for formula in (gold, candidate)
                ]
                other = (gold if value is candidate else candidate).expr
                if (other / sympy.pi).is_Rational and other != 0:
                    pairs = [(turned[0], turned[1])]
                elif other.has(sympy.pi):
                    pairs.append((turned[0], turned[1]))
        return any(self.numbers(*pair, approximately) for pair in pairs)

    def numbers(self, gold: Expr, candidate: Expr, approximately: bool) -> bool:
        if same_formula(gold, candidate):
            return True
        if not approximately or gold.free_symbols or candidate.free_symbols:
            return False
        x, y = approximate(gold), approximate(candidate)
        return x is not None and y is not None and (close(x, y, _EXACT) or self.equal_after_rounding(x, y))

    def equal_after_rounding(self, x: Any, y: Any) -> bool:
        """Return whether the numbers are equal after rounding.

        Numbers that rounding leaves with one or two digits must also agree within 1%.
        """
        if not (x.is_real and y.is_real):
            return all(
                self.equal_after_rounding(*parts) for parts in zip(x.as_real_imag(), y.as_real_imag(), strict=True)
            )
        if x.round(self.decimals) != y.round(self.decimals):
            return False
        return max(abs(x), abs(y)) >= 10.0 ** (2 - self.decimals) or close(x, y, 0.01)

    # Relations.

    def chains(self, gold: Chain, candidate: Chain) -> bool:
        if gold.modulus is not None or candidate.modulus is not None:
            return self.residues(gold, candidate)
        if gold.relations == candidate.relations and len(gold.sides) == len(candidate.sides):
            if set(gold.relations) <= {"=", "approx", "equiv"} and len(gold.sides) == 2:
                return self.equations(gold.sides, candidate.sides)
            if all(self.same(*pair) for pair in zip(gold.sides, candidate.sides, strict=True)):
                return True
        if set(gold.relations) | set(candidate.relations) <= {"=", "approx", "equiv"}:
            left = gold.sides[0]
            named = is_name(left) and is_name(candidate.sides[0]) and self.same(left, candidate.sides[0])
            values = (stated_value(gold), stated_value(candidate))
            return named and None not in values and self.same(*values)
        return self.inequalities(gold, candidate)

    def residues(self, gold: Chain, candidate: Chain) -> bool:
        if gold.modulus is None or candidate.modulus is None:
            return len(gold.sides) == len(candidate.sides) and self.same(gold.sides[-1], candidate.sides[-1])
        if not self.same(gold.modulus, candidate.modulus):
            return False
        one, other = gold.sides[-1], candidate.sides[-1]
        if len(gold.sides) == len(candidate.sides) == 2 and not self.same(gold.sides[0], candidate.sides[0]):
            return False
        if len(gold.sides) == 1:
            return self.same(one, other)
        return self.same(one, other) or (
            isinstance(one, Formula) and isinstance(other, Formula) and congruent(one, other, gold.modulus)
        )

    def equations(self, gold: tuple[Any, ...], candidate: tuple[Any, ...]) -> bool:
        """Return whether names and values are equal, or the differences of the sides are multiples of each other."""
        for left, right in (candidate, candidate[::-1]):
            named = is_name(gold[0]) and is_name(left)
            if named and (self.same(gold[0], left) or _is_graph(gold, left)) and self.same(gold[1], right):
                return True
        if _name_different_units(gold, candidate):
            return False
        candidate = _rename_argument(gold, candidate)
        if not all(isinstance(side, Formula) for side in (*gold, *candidate)):
            return all(self.same(*pair) for pair in zip(gold, candidate, strict=True))
        one, other = (_numerator(Add(pair[0].expr, Mul(-1, pair[1].expr))) for pair in (gold, candidate))
        return multiples(one, other)

    def inequalities(self, gold: Chain, candidate: Chain) -> bool:
        """Return whether the chains have the same links, in either direction and up to positive factors."""
        one, other = _links(gold), _links(candidate)
        if one is None or other is None or len(one) != len(other) or _name_different_units(gold.sides, candidate.sides):
            return False
        return all(any(a[1] == b[1] and multiples(a[0], b[0], positive=True) for b in other) for a in one) and all(
            any(a[1] == b[1] and multiples(a[0], b[0], positive=True) for a in one) for b in other
        )

    # Sets, lists, tuples, matrices.

    def sets(self, gold: Any, candidate: Any) -> bool:
        one, other = reals(gold), reals(candidate)
        if one is None or other is None or (None not in (one[1], other[1]) and one[1] != other[1]):
            return False
        if not one[0] and not any(isinstance(value, Group) and value.kind == "set" for value in (gold, candidate)):
            return False  # two relations without solutions are not therefore the same
        return len(one[0]) == len(other[0]) and self.pieces(one[0], other[0])

    def pieces(self, one: Pieces, other: Pieces) -> bool:
        return all(
            a.closed == b.closed and self.formulas(a.value, b.value)
            for p, q in zip(one, other, strict=True)
            for a, b in zip(p, q, strict=True)
        )

    def builders(self, gold: Builder, candidate: Builder) -> bool:
        return (
            self.same(gold.element, candidate.element)
            and self.same(gold.condition, candidate.condition)
            and (gold.domain == candidate.domain)
        )

    def grids(self, gold: Any, candidate: Any) -> bool:
        """Compare cell by cell. A one-column matrix also equals a tuple."""
        if isinstance(gold, Grid) and isinstance(candidate, Grid):
            shape = [tuple(map(len, grid.rows)) for grid in (gold, candidate)]
            cells = zip(sum(gold.rows, ()), sum(candidate.rows, ()), strict=False)
            return shape[0] == shape[1] and all(self.same(*pair) for pair in cells)
        if all(isinstance(grid, Grid) or _is_grid(grid) for grid in (gold, candidate)):
            return self.grids(*(grid if isinstance(grid, Grid) else _grid(grid) for grid in (gold, candidate)))
        grid, group = (gold, candidate) if isinstance(gold, Grid) else (candidate, gold)
        if not isinstance(group, Group) or group.kind not in PAIRED or any(len(row) != 1 for row in grid.rows):
            return False
        column = tuple(row[0] for row in grid.rows)
        return self.in_order(*((column, group.members) if grid is gold else (group.members, column)))

    def groups(self, gold: Group, candidate: Group) -> bool:
        if gold.kind in BARE and candidate.kind in BARE:
            return self.lists(gold, candidate)
        kinds = {gold.kind, candidate.kind}
        if kinds <= {*PAIRED} or (len(kinds) == 1 and gold.kind in ("[]", "[)", "(]", "time")):
            return self.in_order(gold.members, candidate.members)
        if "list" in kinds and kinds & {*PAIRED}:
            if any(group.kind == "list" and group.joined == "or" and has_names(group) for group in (gold, candidate)):
                return False  # x = 1 or y = 2 is not a point
            one, other = (as_tuple(group) for group in (gold, candidate))
            return any(self.in_order(a, b) for a in one for b in other)
        if len(kinds) == 1 and gold.kind in ("union", "meet"):
            return self.without_order(gold.members, candidate.members, counted=False)
        return False

    def lists(self, gold: Group, candidate: Group) -> bool:
        """Compare without order, except that unnamed values must follow the order of differently named values."""
        if not _joined_alike(gold, candidate):
            return False
        one, other = records(gold), records(candidate)
        if (gold.joined == "or") != (candidate.joined == "or") and (names_of(one) or names_of(other)):
            return False
        if (names_of(one) is None) != (names_of(other) is None):
            if has_names(gold) and has_names(candidate):
                return False  # names of different kinds: x_1, x_2 and a, b
            return self.in_order(*(tuple(map(bare_value, side)) for side in (one, other)))
        if _differ_in_units(one) and not any(_unit_of(value) for value in other):
            return self.in_order(one, other)  # 3 apples, 4 pears
        numbers = not any(isinstance(value, Group) for value in (*one, *other))  # points: a solution set
        counted = gold.kind == "list" and candidate.kind == "list" and numbers
        return self.without_order(one, other, counted=counted)

    def in_order(self, gold: tuple[Any, ...], candidate: tuple[Any, ...]) -> bool:
        return len(gold) == len(candidate) and all(self.same(*pair) for pair in zip(gold, candidate, strict=True))

    def without_order(self, gold: tuple[Any, ...], candidate: tuple[Any, ...], *, counted: bool) -> bool:
        """Return whether the members match in any order.

        counted: with equal multiplicity; otherwise duplicates are ignored.
        """
        if max(len(gold), len(candidate)) > MAX_MEMBERS:
            return self.in_order(gold, candidate)
        if counted and len(gold) != len(candidate):
            return False
        unmatched = list(candidate)
        for expected in gold:
            matches = [other for other in (unmatched if counted else candidate) if self.same(expected, other)]
            if not matches:
                return False
            for other in matches[:1] if counted else matches:
                unmatched = [m for m in unmatched if (m is not other if counted else m != other)]
        return not unmatched


def _is_grid(value: Any) -> bool:
    """Return whether the value is a matrix written as rows in brackets: [[1, 2], [3, 4]]."""
    rows = value.members if isinstance(value, Group) and value.kind == "[]" else ()
    return len(rows) > 1 and all(isinstance(row, Group) and row.kind == "[]" for row in rows)


def _grid(value: Group) -> Grid:
    return Grid(tuple(row.members for row in value.members))


def _joined_alike(gold: Group, candidate: Group) -> bool:
    """Return whether statements or names are joined alike, by `or` in both or in neither.

    Values may be listed with `and` or `or`.
    """
    if gold.joined == candidate.joined or "or" not in (gold.joined, candidate.joined):
        return True
    members = (*gold.members, *candidate.members)
    if any(isinstance(member, Formula) and member.expr.is_Symbol for member in members):
        return False
    return not any(
        isinstance(member, Chain) and not set(member.relations) <= {"=", "approx", "equiv"} for member in members
    )


def _unit_of(value: Any) -> str:
    return value.unit if isinstance(value, Formula) else ""


def _name_different_units(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether both equations or inequalities name units, and not the same: x > 5 cm and x > 5 m."""
    units = [{_unit_of(side) for side in sides} - {""} for sides in (one, other)]
    return all(units) and units[0] != units[1]


def _differ_in_units(members: tuple[Any, ...]) -> bool:
    """Return whether the members have different units, so that their order matters if they have no names."""
    units = [_unit_of(member) for member in members]
    return all(units) and len(set(units)) > 1


def _is_graph(gold: tuple[Any, ...], name: Any) -> bool:
    """Return whether one of the two names is y and the other f(x), with x the only variable of the gold's formula."""
    sides = (gold[0], name)
    functions = [side.expr for side in sides if isinstance(side, Formula) and isinstance(side.expr, AppliedUndef)]
    others = [side.expr for side in sides if isinstance(side, Formula) and side.expr == Symbol("y")]
    if len(functions) != 1 or len(others) != 1 or not isinstance(gold[1], Formula):
        return False
    return functions[0].args == tuple(gold[1].expr.free_symbols)


def _rename_argument(gold: tuple[Any, ...], candidate: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rename the candidate's argument, f(t) = 3t as f(x) = 3x, if the gold answer defines f(x)."""
    one, other = gold[0], candidate[0]
    if not all(isinstance(side, Formula) and isinstance(side.expr, AppliedUndef) for side in (one, other)):
        return candidate
    a, b = one.expr.args, other.expr.args
    if not isinstance(gold[1], Formula) or not set(a) <= gold[1].expr.free_symbols:
        return candidate
    if one.expr.func != other.expr.func or len(a) != len(b) or not all(isinstance(s, Symbol) for s in (*a, *b)):
        return candidate
    change = dict(zip(b, a, strict=True))
    used = set().union(*(formula.expr.free_symbols for side in candidate for formula in formulas(side)))
    if set(a) & (used - set(b)):
        return candidate
    return tuple(
        map_formulas(side, lambda f: dataclasses.replace(f, expr=f.expr.xreplace(change))) for side in candidate
    )


def _numerator(difference: Expr) -> Expr:
    """Return the numerator over a common denominator (`sympy.together` alone keeps the denominator)."""
    if not difference.free_symbols or difference.count_ops() > MAX_OPERATIONS:
        return difference
    numerator, _ = sympy.fraction(sympy.together(difference))
    return numerator


def multiples(one: Expr, other: Expr, *, positive: bool = False) -> bool:
    """Return whether one formula is a constant multiple of the other, with neither equal to 0."""
    free = sorted(one.free_symbols | other.free_symbols, key=str)
    if one.free_symbols != other.free_symbols and not (one.has(AppliedUndef) or other.has(AppliedUndef)):
        return False
    if not free:
        return False
    for shift in (2, 7, 30):
        at = {symbol: sympy.Integer(shift + number * number + number) for number, symbol in enumerate(free)}
        x, y = one.xreplace(at), other.xreplace(at)
        if x.is_zero or y.is_zero or x.has(S.NaN, S.ComplexInfinity) or y.has(S.NaN, S.ComplexInfinity):
            continue
        ratio = x / y
        if positive and not ratio.is_positive:
            return False
        return same_formula(one, Mul(ratio, other))
    return False


def _links(chain: Chain) -> list[tuple[Expr, str]] | None:
    """Return (difference, relation to 0) of neighbors, the greater side first; None unless all sides are formulas."""
    differences = []
    for left, relation, right in zip(chain.sides, chain.relations, chain.sides[1:], strict=False):
        if not (isinstance(left, Formula) and isinstance(right, Formula)) or relation not in ("lt", "gt", "le", "ge"):
            return None
        big, small = (left, right) if relation in ("gt", "ge") else (right, left)
        differences.append((Add(big.expr, Mul(-1, small.expr)), "gt" if relation in ("gt", "lt") else "ge"))
    return differences
