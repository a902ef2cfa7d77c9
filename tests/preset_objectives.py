"""Minimal recipe and objective of a preset, with nothing to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.recipe.presets import of_stage
from posttrain.recipe.stages import RlRecipe
from posttrain.train.objective import Objective

# Keys without a default, so that a preset alone validates.
_REQUIRED = {"model": {"path": "tiny"}, "data": {"source": "none"}, "rewards": [{"use": "none"}]}


def preset_objective(name: str, **overrides: Any) -> Objective:
    """Build the objective of `algorithm: name`.

    overrides: keys of recipe sections, e.g. loss={"clip_high": 0.3}; list entries are addressed by their index,
    advantage_transforms={"0": {"alpha": 0.5}}.
    """
    return Objective.from_recipe(preset_recipe(name, **overrides))


def preset_recipe(name: str, **overrides: Any) -> RlRecipe:
    """Return a recipe of `algorithm: name` that has an objective and nothing to run; see `preset_objective`."""
    return RlRecipe.model_validate(_merge(_merge(_REQUIRED, of_stage(name, "rl").choices), overrides))


def _merge(lower: Any, upper: Any) -> Any:
    """Merge `upper` over `lower` key by key; entries of a list are addressed by their index."""
    if isinstance(lower, list) and isinstance(upper, Mapping):
        return [_merge(entry, upper[str(n)]) if str(n) in upper else entry for n, entry in enumerate(lower)]
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    return {**lower, **{key: _merge(lower.get(key, {}), value) for key, value in upper.items()}}
