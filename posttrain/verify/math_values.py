"""What an answer may be once it is read: a formula, a list, an interval, a relation, a matrix.

Formulas are sympy expressions; importing this imports sympy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

NAMED_SETS = {"R": "real numbers", "Z": "integers", "N": "natural numbers", "Q": "rational numbers", "C": "complex"}


class Unreadable(ValueError):
    """The text is no answer that the grammar knows."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """A number or a function of its letters.

    approximate: a decimal point was written, so it may be rounded. unit: the words behind it. forms: what it leaves to
    be worked out (`gcd`, `sum`, ...).
    """

    expr: Any
    approximate: bool = False
    unit: str = ""
    forms: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Group:
    """Several values. kind: `list` (bare), `set`, `()`, `[]`, `[)`, `(]`, `<>`, `union`, `time`, `system`."""

    kind: str
    members: tuple[Any, ...]
    joined: str = ","  # or "or", "and"


@dataclasses.dataclass(frozen=True)
class Chain:
    """Values with relations between them: `1 < x`, `n = 2+3 = 5`. A modulus belongs to `equiv`."""

    sides: tuple[Any, ...]
    relations: tuple[str, ...]
    modulus: Any = None


@dataclasses.dataclass(frozen=True)
class Grid:
    """A matrix by rows."""

    rows: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True)
class Builder:
    r"""A set by its condition: `\\{x \\in A \\mid condition\\}`."""

    element: Any
    domain: Any  # None if not said
    condition: Any


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """The reals, the integers ..."""

    name: str


@dataclasses.dataclass(frozen=True)
class Without:
    """All of one set but those of another."""

    whole: Any
    left_out: Any


Value = Formula | Group | Chain | Grid | Builder | NamedSet | Without


def walk(value: Any) -> Iterator[Any]:
    """The value and all values in it."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from walk(getattr(value, field.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from walk(one)


def formulas(value: Any) -> list[Formula]:
    """All formulas within a value, in order."""
    return [one for one in walk(value) if isinstance(one, Formula)]


def forms_of(value: Any) -> frozenset[str]:
    """Every form in it that is left to be worked out."""
    return frozenset().union(*(one.forms for one in formulas(value)))


def letters_of(value: Any) -> set[str]:
    """The names of all symbols."""
    return {symbol.name for one in formulas(value) for symbol in one.expr.free_symbols}
