"""Annotation types of recipe keys: mappings with known keys, and names of data columns and rewards.

They allow early checks of a recipe and its data.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict, is_typeddict  # pydantic wants this one before Python 3.12


class NameOf:
    """Annotation that names the kind of thing an argument refers to; its repr is the name of the type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


Column = Annotated[str, NameOf("Column")]  # a number in every row
PartialColumn = Annotated[str, NameOf("PartialColumn")]  # a number in some rows, null in others
TextColumn = Annotated[str, NameOf("TextColumn")]  # a text in some rows, null in others
RewardName = Annotated[str, NameOf("RewardName")]  # a reward of the recipe
ScoreName = Annotated[str, NameOf("ScoreName")]  # a reward of the recipe, `correct` or `reward`
ROLLOUT_COLUMNS = ("tool_seconds",)  # columns filled by rollouts with tools or an environment if the data lacks them

STRICT_CONFIG = ConfigDict(extra="forbid", strict=True)


class Gate(TypedDict, total=False):
    """Condition under which a term applies: all given conditions must hold. An empty gate is always open."""

    __pydantic_config__ = STRICT_CONFIG  # type: ignore[misc]
    rows: Literal["correct"]  # rows with a correct answer
    on: ScoreName  # rows by a reward component, `correct` or `reward`: with min, above, or both
    min: float  # the component is at least this
    above: float  # the component is more than this
    pass_rate: float  # groups with at least this share of correct answers, and at least one (1.0 = all correct)
    top_share: float  # this share (rounded up) of the groups: those with most correct answers, and at least one
    from_step: int  # first step at which the gate is open (warm-up)


class Channel(TypedDict, total=False):
    """A part of the reward with a separate advantage."""

    __pydantic_config__ = STRICT_CONFIG  # type: ignore[misc]
    rewards: dict[ScoreName, float]  # component -> factor in the channel's reward
    weight: float  # weight of the channel's advantage, default 1
    condition: Gate  # rows outside have the channel reward 0
    among: Gate  # rows outside have no channel reward: they join no comparison and get advantage 0


Mark = TypeVar("Mark")


def marked_values(
    annotation: Any, value: Any, kind: type[Mark], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Mark, str]]:
    """Yield (path, mark, text) for every string and mapping key in a value whose annotation has a mark of type `kind`.

    Parts of the value that do not match their type are skipped. annotation: a type, or a field of a pydantic model.
    """
    metadata: Sequence[Any] = ()
    if isinstance(annotation, FieldInfo):
        annotation, metadata = annotation.annotation, annotation.metadata
    elif typing.get_origin(annotation) is Annotated:
        annotation, *metadata = typing.get_args(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if (mark := next((mark for mark in metadata if isinstance(mark, kind)), None)) is not None:
        yield from [(path, mark, value)] if isinstance(value, str) and value else []
    elif is_typeddict(annotation) or origin is dict:
        hints = typing.get_type_hints(annotation, include_extras=True) if is_typeddict(annotation) else {}
        for key, entry in value.items() if isinstance(value, Mapping) else ():
            yield from marked_values(inner[0] if inner else str, key, kind, path)
            yield from marked_values(hints.get(key) if hints else inner[1], entry, kind, (*path, key))
    elif origin in (list, tuple):
        for number, entry in enumerate(value) if isinstance(value, list | tuple) else ():
            yield from marked_values(inner[0], entry, kind, (*path, number))
    else:
        for part in [annotation] if origin is Annotated else inner:
            yield from marked_values(part, value, kind, path)
