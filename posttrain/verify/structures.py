"""Parsers of the commands for sets, matrices and systems. Called by `reading.Reader`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
from sympy import Expr

from posttrain.verify.latex_commands import COMMANDS, register_commands
from posttrain.verify.math_values import NAMED_SETS, Builder, Chain, Grid, Group, NamedSet, Unreadable
from posttrain.verify.tokens import Token

if TYPE_CHECKING:
    from posttrain.verify.reading import Reader

__all__ = ["COMMANDS"]  # commands of latex_commands.py and of this file


@register_commands("emptyset", "varnothing")
def _empty_set(_: Reader) -> Group:
    return Group("set", ())


@register_commands("mathbb", "Bbb")
def _named_set(reader: Reader) -> NamedSet:
    reader.expect("{")
    name = reader.next().text
    reader.expect("}")
    if name not in NAMED_SETS:
        raise Unreadable("no set of numbers")
    for mark in ("^", "_"):
        if reader.take(mark):
            if reader.take("{"):
                end = reader.closing_position()
                name += mark + "".join(token.text for token in reader.tokens[reader.position : end])
                reader.position = end + 1
            else:
                name += mark + reader.next().text
    return NamedSet(name.replace("*", "+").replace("^", "").replace("_", "") if name[0] in "NZ" else name)


@register_commands("\\{")
def _set(reader: Reader) -> Any:
    end = reader.closing_position()
    if reader.position == end:
        reader.position += 1
        return Group("set", ())
    bar = next((p for p in reader.outer(end) if reader.tokens[p].text in ("|", ":") and p > reader.position), None)
    if bar is not None and reader.tokens[reader.position].text != "|" and not _has_separator(reader, bar):
        return _set_by_condition(reader, bar, end)
    bars, reader.bars = reader.bars, 0
    members, _ = reader.members()
    reader.bars = bars
    reader.expect("\\}")
    return Group("set", tuple(members))


def _has_separator(reader: Reader, bar: int) -> bool:
    return any(reader.tokens[p].text in (",", ";") for p in reader.outer(bar))


def _set_by_condition(reader: Reader, bar: int, end: int) -> Builder:
    reader.tokens[bar] = Token("sign", "|")
    bars, reader.bars = reader.bars, 1  # the bar closes nothing, and no factor begins with it
    element = reader.chain()
    reader.bars = bars
    if reader.position != bar:
        raise Unreadable("no element before the bar")
    reader.position += 1
    members, joined = reader.members()
    if reader.position != end:
        raise Unreadable("no condition behind the bar")
    reader.position += 1
    domain = None
    if isinstance(element, Chain) and element.relations == ("in",):
        element, domain = element.sides
    condition = members[0] if len(members) == 1 else Group("list", tuple(members), joined)
    return Builder(element, domain, condition)


@register_commands(
    "begin:pmatrix", "begin:bmatrix", "begin:matrix", "begin:Bmatrix", "begin:smallmatrix", "begin:array"
)
def _matrix(reader: Reader) -> Grid:
    name = reader.tokens[reader.position - 1].text.partition(":")[2]
    rows: list[tuple[Any, ...]] = []
    row: list[Any] = []
    while not reader.take("end:" + name):
        row.append(reader.side())
        if reader.take("&"):
            continue
        if not reader.take("\\") and not reader.at("end:" + name):
            raise Unreadable("no cell of a matrix")
        rows.append(tuple(row))
        row = []
    if row or not rows or len({len(row_cells) for row_cells in rows}) != 1:
        raise Unreadable("rows of a matrix that do not match")
    return Grid(tuple(rows))


def transpose(value: Any) -> Grid:
    """Transpose a matrix; a tuple becomes a column. Raises Unreadable for any other value."""
    if isinstance(value, Grid):
        return Grid(tuple(zip(*value.rows, strict=True)))
    if value.kind != "()":
        raise Unreadable("nothing to transpose")
    return Grid(tuple((cell,) for cell in value.members))


@register_commands("begin:vmatrix", "begin:Vmatrix", "det")
def _determinant(reader: Reader) -> Expr:
    grid = reader.atom() if reader.tokens[reader.position - 1].text == "det" else _matrix(reader)
    if not isinstance(grid, Grid) or len(grid.rows) != len(grid.rows[0]) or len(grid.rows) > 4:
        raise Unreadable("no determinant")
    reader.forms.add("determinant")
    value: Expr = sympy.Matrix([[cell.expr for cell in row] for row in grid.rows]).det(method="berkowitz")
    return value


@register_commands("begin:cases", "begin:aligned", "begin:gathered", "begin:align")
def _system(reader: Reader) -> Group:
    name = reader.tokens[reader.position - 1].text.partition(":")[2]
    members: list[Any] = []
    rows: list[list[Any]] = [[]]
    while not reader.take("end:" + name):
        read = reader.item()
        members += read
        rows[-1] += read
        while reader.at("\\", ",", ";", "and", "&"):
            if reader.next().text == "\\":
                rows.append([])
    pieces = [row for row in rows if row]
    if len(pieces) > 1 and all(len(row) == 2 and _is_piece(*row) for row in pieces):
        members = [Group("()", tuple(row)) for row in pieces]
    return Group("list", tuple(members), "and")


def _is_piece(value: Any, condition: Any) -> bool:
    """Return whether the pair is a value of a piecewise function and the condition for it."""
    return not isinstance(value, Chain) and isinstance(condition, Chain)
