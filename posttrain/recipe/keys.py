"""Queries on the schema: which keys are known at a path, which section a key belongs to, and the table of all keys with
type, default and meaning (`posttrain recipe keys`)."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from posttrain.recipe.limits import MAX_COUNT
from posttrain.recipe.section import ComponentSection, Idle
from posttrain.recipe.stages import STAGES, Stage
from posttrain.recipe.tree import Node, child

BY_NAME: dict[str, type[Stage]] = {c.model_fields["stage"].default: c for c in STAGES.values()}  # `stage: rl` -> class


# Generic key names that many sections have: finding one in another section says nothing about what was meant.
GENERIC_KEYS = ("name", "path", "size", "type", "use", "source", "n", "params", "weight", "metric")


def components_of(stage: object) -> dict[str, type[ComponentSection]]:
    """Return the keys of a stage that hold component sections; empty for an unknown stage."""
    model = BY_NAME.get(stage) if isinstance(stage, str) else None
    fields = model.model_fields if model else {}
    models_by_key = {key: models(field.annotation) for key, field in fields.items()}
    return {key: m[0] for key, m in models_by_key.items() if m and issubclass(m[0], ComponentSection)}


def components_in(node: Node) -> dict[str, type[ComponentSection]]:
    """Return the keys that hold component sections in a mapping with a `stage` key."""
    stage = node.mapping.get("stage")
    return components_of(stage.value if stage else None)


def models(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes inside an annotation: `Lora | None`, `list[Reward]`, `Loss`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models(part)]


def describe_key(field: FieldInfo) -> str:
    """Return the description of a key: its `description`, or the first sentence of its section's docstring."""
    doc = next((inspect.getdoc(model) or "" for model in models(field.annotation)), "")
    return " ".join((field.description or doc.partition("\n\n")[0].partition(". ")[0].rstrip(".")).split())


def own_keys(model: type[BaseModel]) -> dict[str, Any]:
    """Return recipe key -> field of a section (aliases instead of Python names)."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_at(stage: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the section class at a path of a recipe, or None if there is none (free mappings, component arguments)."""
    model: type[BaseModel] = stage
    named = False  # the next part is a user-chosen name in a mapping
    for part in path:
        if isinstance(part, int) or named:
            named = False
            continue
        field = own_keys(model).get(part)
        below = models(field.annotation) if field else []
        if not below or field is None:
            return None
        model, named = below[0], typing.get_origin(field.annotation) is dict
    return model


def section_with(key: str, model: type[BaseModel] | None) -> str | None:
    """Return the key of the only section directly below `model` that has `key`, or None."""
    below = {name: models(field.annotation) for name, field in own_keys(model).items()} if model else {}
    sections = [name for name, inner in below.items() if any(key in own_keys(section) for section in inner)]
    return sections[0] if len(sections) == 1 and not issubclass(model or BaseModel, Stage) else None


def takes_only_text(stage: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Return whether the key at a path takes free text only: no section, list, number or fixed choice of words."""
    model = section_at(stage, path[:-1])
    field = own_keys(model).get(str(path[-1])) if model and path else None
    kind = field.annotation if field else None
    return kind is str or (isinstance(kind, types.UnionType) and set(typing.get_args(kind)) == {str, type(None)})


def known_at(stage: type[Stage], path: Sequence[str | int], node: Node | None) -> list[str]:
    """Return the keys allowed at a path; for a component section also the arguments of the component in use."""
    model = section_at(stage, path)
    if model is None:
        return []
    prefix = ".".join(str(part) for part in path if not isinstance(part, int))
    keys = [key for key in own_keys(model) if f"{prefix}.{key}".lstrip(".") not in stage.unused]
    keys.sort(key=lambda key: model is stage and key in ("extends", "run", "track"))  # keys of all stages come last
    if issubclass(model, ComponentSection):
        named = child(node, "use") if node else None
        use = named.value if named else model.default_use()
        keys += model.registered_components().get(str(use), {}).get("params", {})
    return keys


def walk(
    stage: type[Stage], model: type[BaseModel] | None = None, prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """Yield (key, its section class, its field) for every key of a stage in the order of its schema.

    The keys of a section follow the section. Unused keys and component arguments are left out. `N` in a key is an index
    into a list, `NAME` a name chosen in the recipe.
    """
    for name, field in own_keys(model or stage).items():
        if (key := f"{prefix}{name}") not in stage.unused:
            yield key, model or stage, field
            kinds = _containers(field.annotation)
            step = ".N." if list in kinds else ".NAME." if dict in kinds else "."
            for inner in models(field.annotation)[:1]:
                yield from walk(stage, inner, key + step)


def _containers(annotation: Any) -> set[Any]:
    """Return the outermost containers of an annotation, without unions and marks: {list} of `Annotated[list[X], ...] |
    None`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _containers(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return set[Any]().union(*map(_containers, arguments))
    return {origin} - {None}


def all_paths(stage: type[Stage]) -> Iterator[str]:
    """Yield every dotted key of a stage without list indices and names."""
    return (plain_path(key) for key, *_ in walk(stage))


def plain_path(key: str) -> str:
    """Return a key of `walk` without list indices and names: `rewards.N.use` -> `rewards.use`."""
    return re.sub(r"\.(N|NAME)(?=\.)", "", key)


@functools.cache
def keys_by_last_part(stage: type[Stage]) -> dict[str, list[str]]:
    """Map the last part of each key to the dotted keys that end in it; keys of `eval` only if there are no others."""
    paths_by_key: dict[str, list[str]] = {}
    for path in all_paths(stage):
        paths_by_key.setdefault(path.rpartition(".")[2], []).append(path)
    return {
        key: [path for path in paths if not path.startswith("eval.")] or paths for key, paths in paths_by_key.items()
    }


def in_use(paths: list[str], stage: type[Stage], tree: Node) -> list[str]:
    """Return the dotted keys in sections that the recipe writes or that every run has; all, if there are none."""
    absent = {
        plain_path(key)
        for key, _, field in walk(stage)
        if key not in tree.mapping
        and not field.is_required()
        and (not field.get_default(call_default_factory=True) or any(isinstance(mark, Idle) for mark in field.metadata))
    }
    parents = {path: list(itertools.accumulate(path.split("."), "{}.{}".format)) for path in paths}
    return [path for path in paths if absent.isdisjoint(parents[path][:-1])] or paths


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
    for key, model, field in walk(stage):
        about = describe_key(field)
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
        return " | ".join(dict.fromkeys(_format_type(argument) for argument in arguments))
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
    if models(field.annotation) and value is not None and value != []:
        return "{}"
    in_one_line = isinstance(value, str) and value and "\n" not in value
    return str(value) if in_one_line else json.dumps(value, ensure_ascii=False)
