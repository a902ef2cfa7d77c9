"""Minimal recipe of a preset, with an objective and nothing to run: for tests, and for inspecting a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.recipe.presets import of_stage
from posttrain.recipe.stages import RlRecipe

# Keys without a default, so that a preset alone validates.
_REQUIRED = {"model": {"path": "tiny"}, "data": {"source": "none"}, "rewards": [{"use": "none"}]}


def preset_recipe(name: str, **overrides: Any) -> RlRecipe:
    """Return a recipe of `algorithm: name` that has an objective and nothing to run; see `Objective.from_preset`."""
    return RlRecipe.model_validate(_merge(_merge(_REQUIRED, of_stage(name, "rl").choices), overrides))


def _merge(lower: Any, upper: Any) -> Any:
    """Merge `upper` over `lower` key by key; entries of a list are addressed by their index."""
    if isinstance(lower, list) and isinstance(upper, Mapping):
        return [_merge(entry, upper[str(n)]) if str(n) in upper else entry for n, entry in enumerate(lower)]
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    return {**lower, **{key: _merge(lower.get(key, {}), value) for key, value in upper.items()}}
