"""The controllers of a recipe: which number each drives, and their states from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipe.objective_checks import numbers
from posttrain.recipe.stages import RlRecipe
from posttrain.train.parts import check_keys


@dataclass(frozen=True)
class Controls:
    """Recipe key -> controller, and the number that the recipe has there. States are JSON-able, by the same key."""

    controllers: Mapping[str, Any]
    initial: Mapping[str, float]

    @classmethod
    def from_recipe(cls, recipe: RlRecipe, steps: int = 1) -> Controls:
        """The controllers with their arguments; the user's are looked for beside the recipe. steps: of the run.

        Raises UserError for a name or argument that does not exist, and for what is no controller.
        """
        found: dict[str, Any] = {}
        for key, section in recipe.controllers.items():
            length = {"total_steps": steps} if section.params.get("total_steps", 0) is None else {}
            component = registry.resolve(section.kinds, section.use, recipe.base_dir)
            check_keys(component, section)
            found[key] = component.function(**{**section.params, **length})
            for method in ("start", "value", "update"):
                if not callable(getattr(found[key], method, None)):
                    raise RecipeError(
                        f"controller `{section.use}` has no method `{method}`", where=f"controllers.{key}"
                    )
        known = numbers(recipe)
        return cls(found, {key: known[key] for key in found})

    def start(self) -> dict[str, Any]:
        """The states before the first step."""
        return {key: controller.start(self.initial[key]) for key, controller in self.controllers.items()}

    def numbers(self, states: Mapping[str, Any], step: int) -> dict[str, float]:
        """The numbers of step 0, 1, ..."""
        return {key: controller.value(states[key], step) for key, controller in self.controllers.items()}

    def update(self, states: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """The states after a step with these metrics."""
        return {key: c.update(states[key], metrics, step) for key, c in self.controllers.items()}
