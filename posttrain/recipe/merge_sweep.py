"""Points of `--sweep KEY=START:STOP:STEP`: the values of a key of a merge recipe, one merge each. Does not import
torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from posttrain.errors import RecipeError, did_you_mean
from posttrain.recipe import merging
from posttrain.recipe.merge_sections import MergeParameters
from posttrain.recipe.merging import UNWEIGHTED, given_parameters
from posttrain.recipe.stages import MergeRecipe

_HINT = "write `--sweep weight=0:1:0.1` or `--sweep weight=0.25,0.5,1`"


@dataclass(frozen=True)
class Axis:
    """A key as typed, and its values as text."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One merge of a sweep: its name (`weight=0.5`) and its overrides."""

    name: str
    overrides: tuple[str, ...]


def parse(text: str) -> Axis:
    """Parse `weight=0:1:0.1` (both ends included) or `weight=0,0.5,1`. Raises RecipeError for anything else."""
    key, equals, written = (part.strip() for part in text.partition("="))
    if not (key and equals and written):
        raise RecipeError(f"--sweep {text}: not KEY=VALUES", hint=_HINT)
    values = (
        _expand_range(text, written.split(":")) if ":" in written else [_number(text, v) for v in written.split(",")]
    )
    if len(set(values)) < len(values):
        raise RecipeError(f"--sweep {text}: a value is given twice")
    return Axis(key, tuple(format(value.normalize(), "f") for value in values))


def _expand_range(text: str, parts: Sequence[str]) -> list[Decimal]:
    """Expand START:STOP:STEP into Decimals, so that 0:1:0.1 contains 0.3 and not 0.30000000000000004."""
    if len(parts) != 3:
        raise RecipeError(f"--sweep {text}: a range is START:STOP:STEP", hint=_HINT)
    start, stop, step = (_number(text, part) for part in parts)
    if step == 0 or (stop - start) / step < 0:
        raise RecipeError(f"--sweep {text}: steps of {step} do not lead from {start} to {stop}")
    return [start + step * i for i in range(int((stop - start) / step) + 1)]


def _number(text: str, written: str) -> Decimal:
    try:
        found = Decimal(written.strip())
    except InvalidOperation:
        found = Decimal("nan")
    if not found.is_finite():
        raise RecipeError(f"--sweep {text}: `{written.strip()}` is not a number", hint=_HINT)
    return found


def points(axes: Sequence[Axis], recipe: MergeRecipe) -> list[Point]:
    """Return every combination of the values; the last key changes fastest. Raises RecipeError for a key that cannot
    vary."""
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        raise RecipeError(f"--sweep: {next(k for k in keys if keys.count(k) > 1)} is given twice")
    for key in keys:
        _check(key, recipe)
    return [
        Point(
            ",".join(f"{key}={value}" for key, value in zip(keys, values, strict=True)),
            tuple(o for key, value in zip(keys, values, strict=True) for o in _overrides(key, value, recipe)),
        )
        for values in itertools.product(*(axis.values for axis in axes))
    ]


def _overrides(key: str, value: str, recipe: MergeRecipe) -> list[str]:
    """Return the overrides for one value of a key. A dotted key is used as it is; `weight` of a linear blend of two
    models is the weight of the second, and the first gets 1 - weight."""
    if "." in key:
        return [f"{key}={value}"]
    if key == "weight" and recipe.merge_method == "linear":
        first = format((1 - Decimal(value)).normalize(), "f")
        return [f"models.0.parameters.weight={first}", f"models.1.parameters.weight={value}"]
    return [f"parameters.{key}={value}"]


def _check(key: str, recipe: MergeRecipe) -> None:
    """Raise RecipeError if a key cannot be swept: unknown, not read by the method, or ambiguous."""
    if "." in key:
        return  # a regular override, which loading checks
    known = {field.alias or name: name for name, field in MergeParameters.model_fields.items()}
    if key not in known:
        raise RecipeError(
            f"--sweep: no parameter `{key}` of a merge",
            allowed="a key under `parameters`, or a dotted key such as models.0.parameters.weight",
            hint=did_you_mean(key, known),
        )
    if key != "weight":
        if known[key] not in merging.keys_of(recipe.merge_method):
            raise RecipeError(f"--sweep: {recipe.merge_method} has no parameter {key}: all points would be the same")
        return
    if recipe.merge_method in UNWEIGHTED:
        instead = {"reasoning_vector": "alpha", "slerp": "t", "nearswap": "t", "update_selective": "scale"}
        instead |= {"passthrough": "scale", "sce": "select_topk"}
        method = recipe.merge_method
        hint = f"sweep `{instead[method]}`" if method in instead else ""
        raise RecipeError(f"--sweep: {recipe.merge_method} has no weights", hint=hint)
    if recipe.merge_method == "linear" and len(recipe.models) != 2:
        raise RecipeError(
            f"--sweep weight: of {len(recipe.models) or 'the'} models in a linear merge, which one?",
            hint=f"name it: --sweep {'slices.0.sources.0' if recipe.slices else 'models.0'}.parameters.weight=...",
        )
    weighted = [i for i, model in enumerate(recipe.models) if "weight" in given_parameters(model.parameters)]
    if weighted and recipe.merge_method != "linear":
        raise RecipeError(
            f"--sweep weight: models.{weighted[0]} sets its own weight, which the sweep would not change",
            hint=f"name it: --sweep models.{weighted[0]}.parameters.weight=...",
        )


def best(accuracies: dict[str, float | None]) -> str | None:
    """Return the point with the highest accuracy (the first among equals), or None if no accuracy is known."""
    known = {name: value for name, value in accuracies.items() if value is not None}
    return max(known, key=lambda name: known[name]) if known else None


def slim(values: Any) -> Any:
    """Return resolved values without empty ones (null, {}, []) and without `run`: what a recipe file would contain."""
    if isinstance(values, dict):
        kept = {key: slim(value) for key, value in values.items() if key != "run"}
        return {key: value for key, value in kept.items() if value not in (None, {}, [])}
    return [slim(value) for value in values] if isinstance(values, list) else values
