"""Validation of one stage against its schema; returns the recipe, its resolved values and their origins."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from posttrain.errors import Problem, RecipeError
from posttrain.recipe import checks, keys, layers, presets
from posttrain.recipe.limits import MAX_MAGNITUDE
from posttrain.recipe.problems import convert_errors, format_value
from posttrain.recipe.rl_stage import TAGS
from posttrain.recipe.stages import Stage
from posttrain.recipe.tree import DEFAULT, Node, Origin, follow, format_path, from_plain, leaves, plain

_MAX_PASSES = 5  # removing a wrong value may leave its section incomplete, so several passes are needed


def merge_preset(tree: Node, model: type[Stage], problems: list[Problem]) -> Node:
    """Return `tree` merged over the choices of its `algorithm`, with component sections expanded. An unknown algorithm
    is added to `problems`."""
    lower = Node({}, tree.origin, tree.key_origin)
    if "algorithm" in tree.mapping and "algorithm" in model.model_fields:
        lower = _preset_layer(tree.mapping["algorithm"], model, problems) or lower
    return layers.merge(lower, tree, keys.components_of(model.model_fields["stage"].default))


def _preset_layer(node: Node, model: type[Stage], problems: list[Problem]) -> Node | None:
    """Return the choices of `algorithm: NAME`, or None if it names no preset of this stage."""
    if not isinstance(node.value, str):
        return None  # pydantic reports that it must be text
    try:
        found = presets.of_stage(node.value, model.model_fields["stage"].default)
    except RecipeError as error:
        problems.extend(Problem(node.origin.mark, f"algorithm: {p.what}", p.allowed, p.hint) for p in error.problems)
        return None
    return from_plain(found.choices, Origin("preset", found.name))


def check(tree: Node, model: type[Stage], prefix: Sequence[str | int] = ()) -> tuple[Stage | None, list[Problem]]:
    """Validate one stage's tree against its schema. Returns the recipe (None if invalid) and all problems."""
    problems: list[Problem] = []
    values = plain(tree)
    for key, why in model.unused.items():
        node, depth = follow(tree, key.split("."))
        if depth == key.count(".") + 1:
            stage = model.model_fields["stage"].default
            what = f"{format_path([*prefix, key])}: not used by stage {stage}: {why}"
            problems.append(Problem(node.at_key.mark, what, hint="remove it"))
    _drop_unused(values, model)
    try:
        recipe = model.model_validate(values)
    except ValidationError as error:
        return None, problems + convert_errors(error, tree, model, prefix)
    if immense := list(_check_magnitudes(tree, prefix)):
        return None, problems + immense
    return recipe, problems + checks.run(recipe, tree, prefix)


def resolve_valid_values(
    values: Mapping[str, Any], model: type[Stage], decisive: Collection[str]
) -> dict[str, Any] | None:
    """Return the resolved values of an invalid stage, with defaults in place of the values that its schema refuses.

    Returns None if one of the `decisive` sections has such a value, or if the stage is meaningless without the values.
    """
    remaining = copy.deepcopy(dict(values))
    _drop_unused(remaining, model)
    for _ in range(_MAX_PASSES):
        try:
            return resolve_values(model.model_validate(remaining))
        except ValidationError as error:
            wrong = [[part for part in problem["loc"] if part not in TAGS] for problem in error.errors()]
        places = [_deepest_key(remaining, path) for path in wrong]
        for holder, refused in filter(None, places):
            holder.pop(refused, None)
        if None in places or any(path[0] in decisive for path in wrong):
            return None
    return None


def _deepest_key(values: dict[str, Any], path: Sequence[str | int]) -> tuple[dict[str | int, Any], str | int] | None:
    """Return the deepest existing key on a path, with the mapping that holds it."""
    found: tuple[dict[str | int, Any], str | int] | None = None
    within: Any = values
    for part in path:
        if isinstance(within, dict) and part in within:
            found = within, part
        elif not (isinstance(within, list) and isinstance(part, int) and part < len(within)):
            break
        within = within[part]
    return found


def _check_magnitudes(tree: Node, prefix: Sequence[str | int]) -> Iterator[Problem]:
    """Yield a problem for each number that is too large to compute with."""
    for path, value in leaves(plain(tree)):
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and math.isfinite(number) and abs(number) > MAX_MAGNITUDE:
                node, _ = follow(tree, path)
                what = f"{format_path([*prefix, *path])}: at most {MAX_MAGNITUDE:g}, not {format_value(number)}"
                yield Problem(node.origin.mark, what)


def _drop_unused(values: dict[str, Any], model: type[Stage]) -> None:
    """Remove the keys that a stage does not use (`SECTION.KEY`) from its values."""
    for path in model.unused:
        section, _, key = path.partition(".")
        if isinstance(below := values.get(section), dict):
            below.pop(key, None)


def resolve_values(recipe: Stage) -> dict[str, Any]:
    """Return every value of a recipe as JSON-able data, without keys that its stage does not use."""
    dumped = recipe.model_dump(mode="json", by_alias=True, exclude={"extends", "defaults"})
    run = dumped.pop("run")
    values = {"stage": dumped.pop("stage"), **dumped, "run": run}
    _drop_unused(values, type(recipe))
    return values


def origins(values: dict[str, Any], tree: Node) -> dict[str, Origin]:
    """Return dotted key -> its origin, for every leaf of a resolved recipe."""
    origins: dict[str, Origin] = {}
    for path, _ in leaves(values):
        node, depth = follow(tree, path)
        short = path[depth:] == ("use",) and isinstance(node.value, str)  # `NAME`, short for `{use: NAME}`
        origins[format_path(path)] = node.origin if depth == len(path) or short else DEFAULT
    return origins
