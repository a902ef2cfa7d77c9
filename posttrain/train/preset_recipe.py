"""A preset as a recipe that has an objective and nothing to run: for tests, and for questions about a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.recipe.presets import of_stage
from posttrain.recipe.stages import RlRecipe

_BARE = {"model": {"path": "tiny"}, "data": {"source": "none"}, "rewards": [{"use": "none"}]}  # of a recipe's objective


def preset_recipe(name: str, **overrides: Any) -> RlRecipe:
    """A recipe of `algorithm: NAME` that has an objective and nothing to run; see `Objective.from_preset`."""
    return RlRecipe.model_validate(_over(_over(_BARE, of_stage(name, "rl").choices), overrides))


def _over(lower: Any, upper: Any) -> Any:
    """`upper` over `lower`, key by key; an entry of a list is named by its number."""
    if isinstance(lower, list) and isinstance(upper, Mapping):
        return [_over(entry, upper[str(n)]) if str(n) in upper else entry for n, entry in enumerate(lower)]
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    return {**lower, **{key: _over(lower.get(key, {}), value) for key, value in upper.items()}}
