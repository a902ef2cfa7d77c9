"""Controllers of a recipe: the value that each one sets, and their states from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RecipeError, UserError
from posttrain.recipe.stages import RlRecipe


@dataclass(frozen=True)
class Controls:
    """Controllers and the recipe's initial values, both by recipe key. States are JSON-able, by the same key."""

    controllers: Mapping[str, Any]
    initial: Mapping[str, float]

    @classmethod
    def from_recipe(cls, recipe: RlRecipe, steps: int = 1) -> Controls:
        """Build the controllers of a recipe; user controllers are searched next to the recipe. steps: of the whole run.

        Raises UserError for an unknown name or argument, for an object without a controller's methods, and for an
        invalid value that can be foreseen.
        """
        controllers: dict[str, Any] = {}
        for key, section in recipe.controllers.items():
            length = {"total_steps": steps} if section.params.get("total_steps", 0) is None else {}
            component = section.load(recipe.base_dir)
            controllers[key] = component.function(**{**section.params, **length})
            for method in ("start", "value", "update"):
                if not callable(getattr(controllers[key], method, None)):
                    raise RecipeError(
                        f"controller `{section.use}` has no method `{method}`", where=f"controllers.{key}"
                    )
        known = recipe.controllable_numbers()
        controls = cls(controllers, {key: known[key] for key in controllers})
        for step, given in enumerate(controls.predict_values(steps)):
            check_limits(given, recipe, step)
        return controls

    def start(self) -> dict[str, Any]:
        """Return the states before the first step."""
        return {key: controller.start(self.initial[key]) for key, controller in self.controllers.items()}

    def predict_values(self, steps: int) -> Iterator[dict[str, float]]:
        """Yield the values of the coming steps, of each controller as far as they do not depend on metrics."""
        known = {key: _predict(c, self.initial[key], steps) for key, c in self.controllers.items()}
        for _ in range(steps):
            given = {key: next(values, None) for key, values in known.items()}
            yield {key: number for key, number in given.items() if number is not None}

    def numbers(self, states: Mapping[str, Any], step: int) -> dict[str, float]:
        """Return the values of step 0, 1, ..."""
        return {key: controller.value(states[key], step) for key, controller in self.controllers.items()}

    def update(self, states: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the states after a step with these metrics."""
        return {key: c.update(states[key], metrics, step) for key, c in self.controllers.items()}


def check_limits(values: Mapping[str, float], recipe: RlRecipe, step: int | None = None) -> None:
    """Raise UserError for values beyond what the engine was started with. step: 0, 1, ..., for a step still to come."""
    key, limit = "rollout.max_new_tokens", recipe.rollout.max_new_tokens
    value = round(values.get(key, limit))
    if value > limit:
        when = "" if step is None else f"in step {step + 1} "
        raise UserError(
            f"{when}a controller asks for {value} new tokens, more than rollout.max_new_tokens {limit}",
            where=f"controllers.{key}",
            hint="set rollout.max_new_tokens to the largest value of the controller",
        )


def _predict(controller: Any, initial: float, steps: int) -> Iterator[float]:
    state = controller.start(initial)
    for step in range(steps):
        yield controller.value(state, step)
        try:
            state = controller.update(state, _UnknownMetrics(), step)
        except _MetricsReadError:
            return


class _MetricsReadError(Exception):
    """A controller reads metrics of a step that has not run."""


class _UnknownMetrics(Mapping[str, Any]):
    """Metrics of a step that has not run: any read raises, since not even their names are known."""

    def __getitem__(self, name: str) -> Any:
        raise _MetricsReadError

    def __iter__(self) -> Iterator[str]:
        raise _MetricsReadError

    def __len__(self) -> int:
        raise _MetricsReadError
