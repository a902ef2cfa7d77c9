"""The controllers of a recipe: which number each drives, and their states from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RecipeError, UserError
from posttrain.recipe.argument_checks import load_component
from posttrain.recipe.objective_checks import numbers
from posttrain.recipe.stages import RlRecipe


@dataclass(frozen=True)
class Controls:
    """Recipe key -> controller, and the number that the recipe has there. States are JSON-able, by the same key."""

    controllers: Mapping[str, Any]
    initial: Mapping[str, float]

    @classmethod
    def from_recipe(cls, recipe: RlRecipe, steps: int = 1) -> Controls:
        """The controllers with their arguments; the user's are looked for beside the recipe. steps: of the run.

        Raises UserError for a name or argument that does not exist, for what is no controller, and for a number that
        cannot be and is known to come.
        """
        found: dict[str, Any] = {}
        for key, section in recipe.controllers.items():
            length = {"total_steps": steps} if section.params.get("total_steps", 0) is None else {}
            component = load_component(section, recipe.base_dir)
            found[key] = component.function(**{**section.params, **length})
            for method in ("start", "value", "update"):
                if not callable(getattr(found[key], method, None)):
                    raise RecipeError(
                        f"controller `{section.use}` has no method `{method}`", where=f"controllers.{key}"
                    )
        known = numbers(recipe)
        controls = cls(found, {key: known[key] for key in found})
        for step, given in enumerate(controls.foreseen(steps)):
            check_limits(given, recipe, step)
        return controls

    def start(self) -> dict[str, Any]:
        """The states before the first step."""
        return {key: controller.start(self.initial[key]) for key, controller in self.controllers.items()}

    def foreseen(self, steps: int) -> Iterator[dict[str, float]]:
        """The numbers of the steps to come, each controller's up to where what comes depends on metrics."""
        known = {key: _foreseen(c, self.initial[key], steps) for key, c in self.controllers.items()}
        for _ in range(steps):
            given = {key: next(values, None) for key, values in known.items()}
            yield {key: number for key, number in given.items() if number is not None}

    def numbers(self, states: Mapping[str, Any], step: int) -> dict[str, float]:
        """The numbers of step 0, 1, ..."""
        return {key: controller.value(states[key], step) for key, controller in self.controllers.items()}

    def update(self, states: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """The states after a step with these metrics."""
        return {key: c.update(states[key], metrics, step) for key, c in self.controllers.items()}


def check_limits(given: Mapping[str, float], recipe: RlRecipe, step: int | None = None) -> None:
    """Raises UserError for numbers that the engine, which is started for those of the recipe, cannot do. step: 0, 1,
    ..., where it is still to come."""
    key, limit = "rollout.max_new_tokens", recipe.rollout.max_new_tokens
    asked = round(given.get(key, limit))
    if asked > limit:
        when = "" if step is None else f"in step {step + 1} "
        raise UserError(
            f"{when}a controller asks for {asked} new tokens, more than rollout.max_new_tokens {limit}",
            where=f"controllers.{key}",
            hint="write the largest number that it gives as rollout.max_new_tokens",
        )


def _foreseen(controller: Any, initial: float, steps: int) -> Iterator[float]:
    state = controller.start(initial)
    for step in range(steps):
        yield controller.value(state, step)
        try:
            state = controller.update(state, _Unknown(), step)
        except _AskedError:
            return


class _AskedError(Exception):
    """A controller looks at metrics."""


class _Unknown(Mapping[str, Any]):
    """The metrics of a step to come: nothing can be said of them, not even which there are."""

    def __getitem__(self, name: str) -> Any:
        raise _AskedError

    def __iter__(self) -> Iterator[str]:
        raise _AskedError

    def __len__(self) -> int:
        raise _AskedError
