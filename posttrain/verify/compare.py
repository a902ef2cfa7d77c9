"""Are two values that were read the same answer? By kind; what is not known to be the same is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
from sympy import Add, Expr, Float, Mul, S, Symbol
from sympy.core.function import AppliedUndef

from posttrain.verify.claims import PAIRED, close, congruent, is_name, named_value, said_value
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
from posttrain.verify.record_lists import BARE, as_tuple, bare_value, has_names, names_of, only_member, records, spread
from posttrain.verify.units import ratio_of_units, words_beside

_EXACT = Float("1e-12")
MOST_MEMBERS = 60  # of lists without order, whose members are compared with each other
MOST_OPERATIONS = 150  # of an equation whose quotients are cleared


def same(gold: Value, candidate: Value, decimals: int) -> bool:
    """Whether the candidate is the gold, and leaves nothing to be worked out that the gold does not."""
    if forms_of(candidate) - forms_of(gold):
        return False
    if words_of_conditions(gold) != words_of_conditions(candidate):
        return False
    gold, candidate = in_one_case(gold, candidate)
    return Comparison(decimals).same(only_member(gold, gold=True), only_member(candidate))


def words_of_conditions(value: Any) -> set[str]:
    """The words that say something about a letter, and no unit: `odd` of `n odd` and of `n > 2 odd`."""
    about = [
        one
        for part in walk(value)
        if isinstance(part, Builder)
        or (isinstance(part, Chain) and not set(part.relations) <= {"=", "approx", "equiv"})
        or (isinstance(part, Formula) and part.expr.is_Symbol)
        for one in formulas(part)
    ]
    return set().union(*(words_beside(one.unit) for one in about if one.unit))


def in_coordinates(value: Any) -> Any:
    """`2i - 3j + k` in unit vectors as the tuple of its coordinates; anything else as it is."""
    units = [Symbol(f"hat {letter}") for letter in "ijk"]
    if not isinstance(value, Formula) or not value.expr.free_symbols & set(units):
        return value
    parts = [sympy.diff(value.expr, unit) for unit in units]
    if any(part.has(*units) for part in parts) or not value.expr.subs(dict.fromkeys(units, 0)).is_zero:
        return value
    shown = parts if units[2] in value.expr.free_symbols else parts[:2]
    return Group("()", tuple(dataclasses.replace(value, expr=part) for part in shown))


def in_one_case(*values: Any) -> tuple[Any, ...]:
    """Two values, with letters in lower case that only the case tells apart, if neither uses one in both cases."""
    one, other = names = [letters_of(value) for value in values]
    changed = {
        name
        for name in one ^ other
        if len(name.partition("_")[0].rstrip("'"))
        == 1  # a Greek letter says more by its case: a density is no distribution
        and name.casefold() in {n.casefold() for n in (other if name in one else one)}
    }
    if not changed or any(len({n.casefold() for n in used}) < len(used) for used in names):
        return values
    change = {Symbol(name): Symbol(name.casefold()) for name in changed}
    return tuple(
        map_formulas(value, lambda f: dataclasses.replace(f, expr=f.expr.xreplace(change))) for value in values
    )


def map_formulas(value: Any, change: Callable[[Formula], Formula]) -> Any:
    """The value with every formula in it changed."""
    if isinstance(value, Formula):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_formulas(one, change) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_formulas(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


class Comparison:
    """Comparisons with the rounding of one call."""

    def __init__(self, decimals: int) -> None:
        self.decimals = decimals

    def same(self, gold: Any, candidate: Any) -> bool:
        gold, candidate = spread(gold), spread(candidate)
        if isinstance(gold, Group | Grid) != isinstance(candidate, Group | Grid):
            gold, candidate = in_coordinates(gold), in_coordinates(candidate)
        if isinstance(gold, Formula) and isinstance(candidate, Formula):
            return self.formulas(gold, candidate)
        if isinstance(gold, Chain) and isinstance(candidate, Chain):
            return self.chains(gold, candidate) or self.sets(gold, candidate)
        if isinstance(candidate, Chain):
            said = only_member(said_value(candidate))
            return (said is not None and self.same(gold, said)) or self.sets(gold, candidate)
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
        """The same value in the gold's unit. A percentage is also its number of hundredths, from 1 on."""
        ratio = ratio_of_units(gold.unit.removeprefix("%").strip(), candidate.unit.removeprefix("%").strip())
        percents = [one.unit.startswith("%") for one in (gold, candidate)]
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
                turned = [one.expr * sympy.pi / 180 if one is value else one.expr for one in (gold, candidate)]
                pairs += [(turned[0], turned[1])] * (gold if value is candidate else candidate).expr.has(sympy.pi)
        return any(self.numbers(*pair, approximately) for pair in pairs)

    def numbers(self, gold: Expr, candidate: Expr, approximately: bool) -> bool:
        if same_formula(gold, candidate):
            return True
        if not approximately or gold.free_symbols or candidate.free_symbols:
            return False
        x, y = approximate(gold), approximate(candidate)
        return x is not None and y is not None and (close(x, y, _EXACT) or self.equal_after_rounding(x, y))

    def equal_after_rounding(self, x: Any, y: Any) -> bool:
        """The same after rounding. Of numbers that rounding leaves a digit or two of, within a hundredth too."""
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
            values = (said_value(gold), said_value(candidate))
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
        """The same name and value, or differences of the sides that are multiples of each other."""
        for left, right in (candidate, candidate[::-1]):
            named = is_name(gold[0]) and is_name(left)
            if named and (self.same(gold[0], left) or _is_graph(gold, left)) and self.same(gold[1], right):
                return True
        candidate = _with_argument_of(gold, candidate)
        if not all(isinstance(one, Formula) for one in (*gold, *candidate)):
            return all(self.same(*pair) for pair in zip(gold, candidate, strict=True))
        one, other = (_numerator(Add(pair[0].expr, Mul(-1, pair[1].expr))) for pair in (gold, candidate))
        return multiples(one, other)

    def inequalities(self, gold: Chain, candidate: Chain) -> bool:
        """The same links between neighbours, whichever way round and multiplied by whatever positive number."""
        one, other = _links(gold), _links(candidate)
        if one is None or other is None or len(one) != len(other):
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
            return False  # that neither has a solution does not make two relations the same
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
        """Cell by cell; a column is also a tuple."""
        if isinstance(gold, Grid) and isinstance(candidate, Grid):
            shape = [tuple(map(len, one.rows)) for one in (gold, candidate)]
            cells = zip(sum(gold.rows, ()), sum(candidate.rows, ()), strict=False)
            return shape[0] == shape[1] and all(self.same(*pair) for pair in cells)
        if all(isinstance(one, Grid) or _is_grid(one) for one in (gold, candidate)):
            return self.grids(*(one if isinstance(one, Grid) else _grid(one) for one in (gold, candidate)))
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
            if any(one.kind == "list" and one.joined == "or" and has_names(one) for one in (gold, candidate)):
                return False  # x = 1 or y = 2 is no point
            one, other = (as_tuple(group) for group in (gold, candidate))
            return any(self.in_order(a, b) for a in one for b in other)
        if len(kinds) == 1 and gold.kind in ("union", "meet"):
            return self.without_order(gold.members, candidate.members, counted=False)
        return False

    def lists(self, gold: Group, candidate: Group) -> bool:
        """Without order; but values beside values with different names stand in the order of the names."""
        if not _joined_alike(gold, candidate):
            return False
        one, other = records(gold), records(candidate)
        if (gold.joined == "or") != (candidate.joined == "or") and (names_of(one) or names_of(other)):
            return False
        if (names_of(one) is None) != (names_of(other) is None):
            if has_names(gold) and has_names(candidate):
                return False  # of different kinds: x_1, x_2 and a, b
            return self.in_order(*(tuple(map(bare_value, side)) for side in (one, other)))
        if _differ_in_units(one) and not any(_unit_of(value) for value in other):
            return self.in_order(one, other)  # 3 apples, 4 pears
        numbers = not any(isinstance(value, Group) for value in (*one, *other))  # points are solutions, a set
        counted = gold.kind == "list" and candidate.kind == "list" and numbers
        return self.without_order(one, other, counted=counted)

    def in_order(self, gold: tuple[Any, ...], candidate: tuple[Any, ...]) -> bool:
        return len(gold) == len(candidate) and all(self.same(*pair) for pair in zip(gold, candidate, strict=True))

    def without_order(self, gold: tuple[Any, ...], candidate: tuple[Any, ...], *, counted: bool) -> bool:
        """Whether each member of one is one of the other. counted: as often; else what is named twice is named once."""
        if max(len(gold), len(candidate)) > MOST_MEMBERS:
            return self.in_order(gold, candidate)
        if counted and len(gold) != len(candidate):
            return False
        left = list(candidate)
        for one in gold:
            found = [other for other in (left if counted else candidate) if self.same(one, other)]
            if not found:
                return False
            for other in found[:1] if counted else found:
                left = [kept for kept in left if kept is not other] if counted else [k for k in left if k != other]
        return not left


def _is_grid(value: Any) -> bool:
    """Whether it is a matrix by rows in brackets: [[1, 2], [3, 4]]."""
    rows = value.members if isinstance(value, Group) and value.kind == "[]" else ()
    return len(rows) > 1 and all(isinstance(row, Group) and row.kind == "[]" for row in rows)


def _grid(value: Group) -> Grid:
    return Grid(tuple(row.members for row in value.members))


def _joined_alike(gold: Group, candidate: Group) -> bool:
    """Of statements and of names: whether `and` is `and`, and `or` is `or`. Values are listed with either."""
    if gold.joined == candidate.joined or "or" not in (gold.joined, candidate.joined):
        return True
    members = (*gold.members, *candidate.members)
    if any(isinstance(one, Formula) and one.expr.is_Symbol for one in members):
        return False
    return not any(isinstance(one, Chain) and not set(one.relations) <= {"=", "approx", "equiv"} for one in members)


def _unit_of(value: Any) -> str:
    return value.unit if isinstance(value, Formula) else ""


def _differ_in_units(members: tuple[Any, ...]) -> bool:
    """Whether the members are of different things, which their order tells apart where they are not named."""
    units = [_unit_of(one) for one in members]
    return all(units) and len(set(units)) > 1


def _is_graph(gold: tuple[Any, ...], name: Any) -> bool:
    """Whether the gold is y = ... and the name f(x), or the other way round, and x the letter of the gold's formula."""
    sides = (gold[0], name)
    functions = [one.expr for one in sides if isinstance(one, Formula) and isinstance(one.expr, AppliedUndef)]
    others = [one.expr for one in sides if isinstance(one, Formula) and one.expr == Symbol("y")]
    if len(functions) != 1 or len(others) != 1 or not isinstance(gold[1], Formula):
        return False
    return functions[0].args == tuple(gold[1].expr.free_symbols)


def _with_argument_of(gold: tuple[Any, ...], candidate: tuple[Any, ...]) -> tuple[Any, ...]:
    """f(t) = 3t as f(x) = 3x, where the gold says what f(x) is."""
    one, other = gold[0], candidate[0]
    if not all(isinstance(side, Formula) and isinstance(side.expr, AppliedUndef) for side in (one, other)):
        return candidate
    a, b = one.expr.args, other.expr.args
    if not isinstance(gold[1], Formula) or not set(a) <= gold[1].expr.free_symbols:
        return candidate
    if one.expr.func != other.expr.func or len(a) != len(b) or not all(isinstance(s, Symbol) for s in (*a, *b)):
        return candidate
    change = dict(zip(b, a, strict=True))
    used = set().union(*(one.expr.free_symbols for side in candidate for one in formulas(side)))
    if set(a) & (used - set(b)):
        return candidate
    return tuple(
        map_formulas(side, lambda f: dataclasses.replace(f, expr=f.expr.xreplace(change))) for side in candidate
    )


def _numerator(difference: Expr) -> Expr:
    """What a quotient of two sums is 0 with. sympy's `together` only brings to one denominator."""
    if not difference.free_symbols or difference.count_ops() > MOST_OPERATIONS:
        return difference
    above, _ = sympy.fraction(sympy.together(difference))
    return above


def multiples(one: Expr, other: Expr, *, positive: bool = False) -> bool:
    """Whether one formula is a constant multiple of the other, neither of them 0."""
    free = sorted(one.free_symbols | other.free_symbols, key=str)
    if one.free_symbols != other.free_symbols and not (one.has(AppliedUndef) or other.has(AppliedUndef)):
        return False
    if not free:
        return False
    for shift in (2, 7, 30):
        at = {symbol: sympy.Integer(shift + place * place + place) for place, symbol in enumerate(free)}
        x, y = one.xreplace(at), other.xreplace(at)
        if x.is_zero or y.is_zero or x.has(S.NaN, S.ComplexInfinity) or y.has(S.NaN, S.ComplexInfinity):
            continue
        ratio = x / y
        if positive and not ratio.is_positive:
            return False
        return same_formula(one, Mul(ratio, other))
    return False


def _links(chain: Chain) -> list[tuple[Expr, str]] | None:
    """(difference, relation to 0) of neighbours, greater first; None where not all are formulas."""
    found = []
    for left, relation, right in zip(chain.sides, chain.relations, chain.sides[1:], strict=False):
        if not (isinstance(left, Formula) and isinstance(right, Formula)) or relation not in ("lt", "gt", "le", "ge"):
            return None
        big, small = (left, right) if relation in ("gt", "ge") else (right, left)
        found.append((Add(big.expr, Mul(-1, small.expr)), "gt" if relation in ("gt", "lt") else "ge"))
    return found
