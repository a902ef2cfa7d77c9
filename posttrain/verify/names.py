"""Names in an answer: letters with subscripts and primes, functions with arguments, `e` and `i`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sympy import Expr, Function, I, S, Symbol

from posttrain.verify.cursor import END, SEPARATORS
from posttrain.verify.math_values import Formula, Group, Unreadable

if TYPE_CHECKING:
    from posttrain.verify.reading import Reader

FUNCTION_NAMES = frozenset("fghFGHuvwW")


def read_name(reader: Reader, letter: str, constant: bool = True) -> Any:
    """Read a letter with subscript and primes; return its symbol, function application or constant."""
    start = reader.position - 1
    name = letter + read_subscript(reader)
    while reader.take("'", "prime"):
        name += "'"
    if _has_arguments(reader, name) and reader.at("("):
        return _read_application(reader, name)
    before = reader.tokens[start - 1] if start else END
    alone = before is END or before.kind == "relation" or before.text in SEPARATORS
    named = alone and reader.peek().kind == "relation"  # as in e = 1/2
    if constant and not named and name == "e":
        return S.Exp1
    if constant and not named and name == "i":
        return I
    return Symbol(name)


def _has_arguments(reader: Reader, name: str) -> bool:
    """Return whether the bracket after a name holds arguments: of a function, or in `P(A) =` at the start of a side.

    `I(0)` is a value of I, since nobody multiplies by a bracket with 0.
    """
    if not reader.at("("):
        return False
    if name[0] in FUNCTION_NAMES or (reader.peek(1).text, reader.peek(2).text) == ("0", ")"):
        return True
    reader.position += 1
    end = reader.closing_position()
    reader.position -= 1
    following = reader.tokens[end + 1] if end + 1 < len(reader.tokens) else END
    before = reader.tokens[reader.position - 2] if reader.position >= 2 else None
    first = before is None or before.kind == "relation" or before.text in SEPARATORS
    return first and following[:2] == ("relation", "=")


def _read_application(reader: Reader, name: str) -> Any:
    reader.expect("(")
    start, end = reader.position, reader.closing_position()
    try:
        value = reader.inside(end, "()")
        given = value.members if isinstance(value, Group) else (value,)
        arguments = [argument.expr if isinstance(argument, Formula) else argument for argument in given]
        if reader.position != end or not all(isinstance(argument, Expr) for argument in arguments):
            raise Unreadable("no arguments")
    except Unreadable:
        arguments = [Symbol("".join(token.text for token in reader.tokens[start:end]))]
    reader.position = end + 1
    return Function(name)(*arguments)


def read_subscript(reader: Reader) -> str:
    """Read the subscript that follows and return it as `_TEXT`; empty if there is none."""
    if not reader.take("_"):
        return ""
    if not reader.take("{"):
        return "_" + reader.next().text
    end = reader.closing_position()
    text = "".join(token.text for token in reader.tokens[reader.position : end])
    reader.position = end + 1
    return "_" + text
