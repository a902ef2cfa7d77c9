"""Types of recipe keys that say more than `str` or `dict`: mappings with known keys, and names of data columns and of
rewards. So a recipe, and the data it names, are checked early."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict, is_typeddict  # pydantic wants this one before Python 3.12


class NameOf:
    """Marks what an argument is the name of; its repr is the name of the type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


Column = Annotated[str, NameOf("Column")]  # every row has a number there
PartialColumn = Annotated[str, NameOf("PartialColumn")]  # some rows have one, others null
TextColumn = Annotated[str, NameOf("TextColumn")]  # some rows have a text there, others null
RewardName = Annotated[str, NameOf("RewardName")]  # a reward of the recipe
ScoreName = Annotated[str, NameOf("ScoreName")]  # the same, or `correct` or `reward`
MEASURED = ("tool_seconds",)  # columns that rollouts with tools or an environment fill in where the data has none

CLOSED = ConfigDict(extra="forbid", strict=True)


class Gate(TypedDict, total=False):
    """Where a term applies: every condition that is written must hold. An empty gate is open everywhere."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    rows: Literal["correct"]  # rows with a right answer
    on: ScoreName  # rows by a reward component, `correct` or `reward`: with min, above, or both
    min: float  # the component is at least this
    above: float  # the component is more than this
    pass_rate: float  # groups with at least this share of right answers, and with any (1.0 = all right)
    top_share: float  # this share of the batch's groups, those with most right answers, rounded up, and with any
    from_step: int  # steps of the run before which the gate is closed (a warm-up)


class Channel(TypedDict, total=False):
    """A part of the reward with an advantage of its own."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    rewards: dict[ScoreName, float]  # component: factor in the channel's reward
    weight: float  # of the channel's advantage, default 1
    condition: Gate  # rows outside have the channel reward 0
    among: Gate  # rows outside have no channel reward: they are compared with nobody and get 0


Mark = TypeVar("Mark")


def marked_values(
    annotation: Any, value: Any, kind: type[Mark], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Mark, str]]:
    """(place, mark, text) of every text in a value, and of every key of a mapping, whose annotation has a mark of that
    kind. A value that is not of its type has none. annotation: a type, or a field of a pydantic model."""
    if isinstance(annotation, FieldInfo):
        annotation = Annotated[annotation.annotation, *annotation.metadata, None]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    marks = [mark for mark in inner[1:] if origin is Annotated and isinstance(mark, kind)]
    if marks:
        yield from [(path, marks[0], value)] if isinstance(value, str) and value else []
    elif is_typeddict(annotation) or origin is dict:
        hints = typing.get_type_hints(annotation, include_extras=True) if is_typeddict(annotation) else {}
        for key, one in value.items() if isinstance(value, Mapping) else ():
            yield from marked_values(inner[0] if inner else str, key, kind, path)
            yield from marked_values(hints.get(key) if hints else inner[1], one, kind, (*path, key))
    elif origin in (list, tuple):
        for number, one in enumerate(value) if isinstance(value, list | tuple) else ():
            yield from marked_values(inner[0], one, kind, (*path, number))
    else:
        for part in inner[:1] if origin is Annotated else inner:
            yield from marked_values(part, value, kind, path)
