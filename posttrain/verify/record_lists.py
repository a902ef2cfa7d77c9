"""Lists of answers as records: named values, tuples of them, one-member lists."""

from __future__ import annotations

from typing import Any

from posttrain.verify.claims import PAIRED, is_name, stated_value
from posttrain.verify.math_values import Chain, Formula, Group

BARE = ("list", "set")


def only_member(value: Any, *, gold: bool = False) -> Any:
    """Return the 5 of `{5}` and of the answer `5 or 5`. A gold answer that is a bare list keeps all its members."""
    if gold and isinstance(value, Group) and value.kind == "list" and len(value.members) > 1:
        return value
    if not isinstance(value, Group) or value.kind not in BARE or not value.members:
        return value
    member = value.members[0]
    if any(other != member for other in value.members) or (
        value.kind == "set" and isinstance(member, Group) and member.kind != "()"
    ):
        return value
    return member


def split_tuple_equation(value: Any) -> Any:
    """Convert `(x, y) = (1, 2)` to x = 1, y = 2."""
    if (
        not isinstance(value, Chain)
        or value.relations != ("=",)
        or not all(isinstance(side, Group) for side in value.sides)
    ):
        return value
    names, values = value.sides
    if not is_name(names) or values.kind not in PAIRED or len(names.members) != len(values.members):
        return value
    return Group("list", tuple(Chain(pair, ("=",)) for pair in zip(names.members, values.members, strict=True)), "and")


def _flat(group: Group) -> tuple[Any, ...]:
    return tuple(
        part
        for member in group.members
        for part in (
            _flat(member) if isinstance(member, Group) and member.kind == "list" and group.kind in BARE else (member,)
        )
    )


def _name_of(member: Any) -> str | None:
    named = isinstance(member, Chain) and set(member.relations) <= {"=", "approx"} and is_name(member.sides[0])
    if not named:
        return None
    side = member.sides[0]
    return str(side.expr) if isinstance(side, Formula) else str(side)


def names_of(members: tuple[Any, ...]) -> list[str] | None:
    """Return the names of a list whose values all have names, if there are several different names; else None."""
    names = [_name_of(member) for member in members]
    return [name for name in names if name] if None not in names and len(set(names)) > 1 else None


def has_names(group: Group) -> bool:
    """Return whether any value in the group has a name."""
    return any(_name_of(member) for member in _flat(group))


def bare_value(member: Any) -> Any:
    """Return the value of a member `name = value`; return other members unchanged."""
    return stated_value(member) if _name_of(member) is not None else member


def _are_roots(members: tuple[Any, ...]) -> bool:
    """Return whether the members are numbered solutions x_1 = ..., x_2 = ..., which may come in any order."""
    names = [_name_of(member) for member in members]
    return len(names) > 1 and any(names == [f"{letter}_{k + 1}" for k in range(len(names))] for letter in "xtz")


def records(group: Group) -> tuple[Any, ...]:
    """Return the members; `p=5, q=2, p=7, q=2` gives two pairs."""
    members = _flat(group)
    if _are_roots(members):
        return tuple(map(bare_value, members))
    names = names_of(members)
    if names is None:
        return members
    width = len(set(names))
    if width == len(names) or len(names) % width or names != names[:width] * (len(names) // width):
        return members
    values = tuple(map(bare_value, members))
    return tuple(Group("()", values[start : start + width]) for start in range(0, len(values), width))


def as_tuple(group: Group) -> list[tuple[Any, ...]]:
    """Return the tuples that a bare list may denote: in the given order; values of x, y and z sorted by name."""
    if group.kind != "list":
        return [group.members]
    members = records(group)
    names = names_of(members)
    if names is None:
        return [members]
    pairs = list(zip(names, map(bare_value, members), strict=True))
    letters = {equation.sides[0].expr.name if isinstance(equation.sides[0], Formula) else "" for equation in members}
    if letters <= {"x", "y", "z", "w"}:
        pairs.sort(key=lambda pair: pair[0])
    return [tuple(value for _, value in pairs)]
