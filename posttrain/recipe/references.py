"""Names of things outside a recipe: models, data, files, functions.

The schema marks these keys (`section.Names`, and every section with a `use`), so a new key is found like all others.
Values may come from an invalid recipe: anything that does not have the form of the schema is skipped.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from posttrain.options import marked_values
from posttrain.path_resolution import EARLIER
from posttrain.recipe import keys
from posttrain.recipe.section import ComponentSection, NamedSection, Names, expand_use
from posttrain.recipe.stages import PipelineRecipe, Stage
from posttrain.recipe.tree import Path_


@dataclass(frozen=True)
class SectionRef:
    """One section of a recipe: its path, its class and its values."""

    path: Path_
    model: type[BaseModel]
    values: Mapping[str, Any]


def stages(values: Mapping[str, Any], verb: type[Stage] | None = None) -> Iterator[tuple[Path_, type[Stage], Any]]:
    """Yield (path, schema, values) of the recipe, or of each stage of a pipeline. verb: the stage if `stage` is not
    written."""
    model = keys.BY_NAME.get(str(values.get("stage")), verb)
    if model is PipelineRecipe or "stages" in values:
        for position, stage in enumerate(_as_list(values.get("stages"))):
            if isinstance(stage, Mapping) and (inner := keys.BY_NAME.get(str(stage.get("stage")))):
                yield ("stages", position), inner, stage
    elif model is not None:
        yield (), model, values


def parts(model: type[BaseModel], values: Any, path: Path_ = ()) -> Iterator[SectionRef]:
    """Yield a section and all sections inside it, in the order of the schema. `NAME` of a component is short for `use:
    NAME`."""
    if issubclass(model, ComponentSection | NamedSection):
        values = expand_use(values)
    if not isinstance(values, Mapping):
        return
    yield SectionRef(path, model, values)
    for key, field in keys.own_keys(model).items():
        inner, value = keys.models(field.annotation), values.get(key)
        if not inner:
            continue
        below: dict[Path_, Any]
        if isinstance(value, Mapping) and typing.get_origin(field.annotation) is dict:
            below = {(key, str(name)): inner for name, inner in value.items()}
        elif isinstance(value, list):
            below = {(key, number): inner for number, inner in enumerate(value)}
        else:
            below = {(key,): value}
        for place, part in below.items():
            yield from parts(inner[0], part, (*path, *place))


def names(part: SectionRef) -> Iterator[tuple[Path_, Names, str]]:
    """Yield (path, kind of name, name) for every marked key of a section, without names of earlier stages."""
    for place, mark, name in _find_names(part.model, part.values):
        if not name.startswith(EARLIER):
            yield (*part.path, *place), mark, name


def names_in(section: BaseModel) -> Iterator[tuple[Path_, Names, str]]:
    """Yield (path, kind of name, name) for every marked key of a valid section, including names of earlier stages."""
    model = type(section)
    yield from _find_names(model, {f.alias or name: getattr(section, name) for name, f in model.model_fields.items()})


def _find_names(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[Path_, Names, str]]:
    for key, field in keys.own_keys(model).items():
        yield from marked_values(field, values.get(key), Names, (key,))


def arguments(
    function: Callable[..., Any], params: Mapping[str, Any], path: Path_
) -> Iterator[tuple[Path_, Names, str]]:
    """Yield (path, kind of name, name) for a function's arguments whose annotations are marked like keys of the
    schema."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # annotations that fail to evaluate are the script's own problem
        return
    for key, value in params.items():
        found = marked_values(hints.get(key), value, Names, (*path, key))
        yield from (reference for reference in found if not reference[2].startswith(EARLIER))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
