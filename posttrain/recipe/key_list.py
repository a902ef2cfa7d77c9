"""Table of every key of a stage: type, default, and one line on its meaning (`posttrain recipe keys`)."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from posttrain.recipe import keys
from posttrain.recipe.limits import MAX_COUNT
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.stages import Stage

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_HIDDEN_LIMITS = (MAX_COUNT, 2**63, -(2**63))  # technical limits that are not worth showing
REQUIRED = "(required)"


class Key(NamedTuple):
    """One key of a recipe. `N` in it is an index into a list, `NAME` a name chosen in the recipe. A section has no
    default."""

    key: str
    type: str
    default: str
    about: str


def list_keys(stage: type[Stage]) -> Iterator[Key]:
    """Yield the keys of a stage in the order of its schema; the keys of a section follow the section."""
    for key, model, field in keys.walk(stage):
        about = keys.describe_key(field)
        if key.split(".")[-1] == "use" and issubclass(model, ComponentSection):
            about = (
                f"component name; its arguments are keys beside it: `posttrain methods list --kind {model.kinds[0]}`"
            )
        if key == "stage":
            about = "the command that the recipe is for"
        yield Key(key, _type(field), _default(field), about)


def _type(field: FieldInfo) -> str:
    limits = "".join(
        f" {sign} {getattr(mark, name):g}"
        for mark in field.metadata
        for name, sign in SIGNS.items()
        if hasattr(mark, name) and getattr(mark, name) not in _HIDDEN_LIMITS
    )
    return f"{_format_type(field.annotation)}{limits}"


def _format_type(annotation: Any) -> str:
    """Return a type in the words of a recipe's author."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(FieldInfo.from_annotation(annotation))
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_format_type(one) for one in arguments))
    if origin is list:
        return f"list of {_format_type(arguments[0])}"
    if origin is dict:
        return f"mapping to {_format_type(arguments[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {str: "text", bool: "true | false", Any: "anything"}.get(
        annotation, getattr(annotation, "__name__", "anything")
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    if keys.models(field.annotation) and value is not None and value != []:
        return "{}"
    in_one_line = isinstance(value, str) and value and "\n" not in value
    return str(value) if in_one_line else json.dumps(value, ensure_ascii=False)
