"""One stage's values against its schema, and what comes out: the recipe, its resolved values and their origins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from posttrain.errors import Problem, RecipeError
from posttrain.recipe import checks, keys, layers, presets
from posttrain.recipe.limits import LARGEST
from posttrain.recipe.problems import format_value, tell
from posttrain.recipe.stages import Stage
from posttrain.recipe.tree import DEFAULT, Node, Origin, follow, format_path, from_plain, leaves, plain


def with_preset(tree: Node, model: type[Stage], problems: list[Problem]) -> Node:
    """`tree` over the choices of its `algorithm`, component sections spelt out. An unknown one is put in `problems`."""
    lower = Node({}, tree.origin, tree.key_origin)
    if "algorithm" in tree.mapping and "algorithm" in model.model_fields:
        lower = _preset_layer(tree.mapping["algorithm"], model, problems) or lower
    return layers.merge(lower, tree, keys.components_of(model.model_fields["stage"].default))


def _preset_layer(node: Node, model: type[Stage], problems: list[Problem]) -> Node | None:
    """The choices of `algorithm: NAME`, or None where it names no preset of this stage."""
    if not isinstance(node.value, str):
        return None  # pydantic tells that it must be text
    try:
        found = presets.of_stage(node.value, model.model_fields["stage"].default)
    except RecipeError as error:
        problems.extend(Problem(node.origin.mark, f"algorithm: {p.what}", p.allowed, p.hint) for p in error.problems)
        return None
    return from_plain(found.choices, Origin("preset", found.name))


def check(tree: Node, model: type[Stage], prefix: Sequence[str | int] = ()) -> tuple[Stage | None, list[Problem]]:
    """One stage's tree against its schema: the recipe if it is right, and all problems."""
    problems: list[Problem] = []
    values = plain(tree)
    for key, why in model.unused.items():
        node, depth = follow(tree, key.split("."))
        if depth == key.count(".") + 1:
            stage = model.model_fields["stage"].default
            what = f"{format_path([*prefix, key])}: not used by stage {stage}: {why}"
            problems.append(Problem(node.at_key.mark, what, hint="remove it"))
            _remove(values, key.split("."))
    try:
        recipe = model.model_validate(values)
    except ValidationError as error:
        return None, problems + tell(error, tree, model, prefix)
    if immense := list(_immense(tree, prefix)):
        return None, problems + immense
    return recipe, problems + checks.run(recipe, tree, prefix)


def _immense(tree: Node, prefix: Sequence[str | int]) -> Iterator[Problem]:
    """Numbers with which nothing can be computed, wherever they stand."""
    for path, value in leaves(plain(tree)):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int | float) and math.isfinite(one) and abs(one) > LARGEST:
                node, _ = follow(tree, path)
                yield Problem(
                    node.origin.mark, f"{format_path([*prefix, *path])}: at most {LARGEST:g}, not {format_value(one)}"
                )


def _remove(values: dict[str, Any], parts: list[str]) -> None:
    for part in parts[:-1]:
        values = values[part]
    values.pop(parts[-1])


def resolve_values(recipe: Stage) -> dict[str, Any]:
    """Every value of a recipe as JSON-able data, without keys that its stage does not use."""
    dumped = recipe.model_dump(mode="json", by_alias=True, exclude={"extends", "defaults"})
    run = dumped.pop("run")
    values = {"stage": dumped.pop("stage"), **dumped, "run": run}
    for key in type(recipe).unused:
        parts = key.split(".")
        if isinstance(values.get(parts[0]), dict):
            values[parts[0]].pop(parts[1], None)
    return values


def origins(values: dict[str, Any], tree: Node) -> dict[str, Origin]:
    """Dotted key -> who gave it, for every leaf of a resolved recipe."""
    found: dict[str, Origin] = {}
    for path, _ in leaves(values):
        node, depth = follow(tree, path)
        short = path[depth:] == ("use",) and isinstance(node.value, str)  # `NAME` instead of `{use: NAME}`
        found[format_path(path)] = node.origin if depth == len(path) or short else DEFAULT
    return found
