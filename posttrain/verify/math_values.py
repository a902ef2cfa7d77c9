"""Values of parsed answers: formulas, lists, intervals, relations, matrices.

Formulas are sympy expressions; importing this module imports sympy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

NAMED_SETS = {"R": "real numbers", "Z": "integers", "N": "natural numbers", "Q": "rational numbers", "C": "complex"}


class Unreadable(ValueError):
    """Raised if the grammar cannot parse the text."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """A number or an expression in variables.

    approximate: written with a decimal point, so possibly rounded. unit: words after the number. forms: operations left
    unevaluated (`gcd`, `sum`, ...).
    """

    expr: Any
    approximate: bool = False
    unit: str = ""
    forms: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Group:
    """Several values of one kind.

    kind: `list` (without brackets), `set`, `()`, `[]`, `[)`, `(]`, `<>`, `union`, `time`, `system`.
    """

    kind: str
    members: tuple[Any, ...]
    joined: str = ","  # or "or", "and"


@dataclasses.dataclass(frozen=True)
class Chain:
    """Values with relations between them: `1 < x`, `n = 2+3 = 5`. modulus: of `equiv`, else None."""

    sides: tuple[Any, ...]
    relations: tuple[str, ...]
    modulus: Any = None


@dataclasses.dataclass(frozen=True)
class Grid:
    """A matrix, as rows."""

    rows: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True)
class Builder:
    r"""A set defined by a condition: `\{x \in A \mid condition\}`."""

    element: Any
    domain: Any  # None if not given
    condition: Any


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """A standard number set, such as the reals or the integers."""

    name: str


@dataclasses.dataclass(frozen=True)
class Without:
    """A set difference: `whole` without the elements of `left_out`."""

    whole: Any
    left_out: Any


Value = Formula | Group | Chain | Grid | Builder | NamedSet | Without


def walk(value: Any) -> Iterator[Any]:
    """Yield the value and all values nested in it."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from walk(getattr(value, field.name))
    elif isinstance(value, tuple):
        for member in value:
            yield from walk(member)


def formulas(value: Any) -> list[Formula]:
    """Return all formulas within a value, in order."""
    return [node for node in walk(value) if isinstance(node, Formula)]


def forms_of(value: Any) -> frozenset[str]:
    """Return all unevaluated forms within a value."""
    return frozenset().union(*(node.forms for node in formulas(value)))


def letters_of(value: Any) -> set[str]:
    """Return the names of all symbols within a value."""
    return {symbol.name for formula in formulas(value) for symbol in formula.expr.free_symbols}
