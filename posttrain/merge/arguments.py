"""The weights and keyword arguments of a merge rule for each tensor, from the recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.merge.values import value_at
from posttrain.recipe.merge_sections import MergeModel, MergeParameters
from posttrain.recipe.merging import PER_MODEL, given
from posttrain.registry import Component

_SCALES = ("lam", "scale", "alpha", "t")  # 0 means that the result is the anchor


@dataclass(frozen=True)
class Arguments:
    """Settings of a merge. common: for all models. own: those of each model that the rule gets."""

    rule: Component
    common: dict[str, Any]
    own: list[dict[str, Any]]
    layers: int

    @staticmethod
    def of(rule: Component, parameters: MergeParameters, models: list[MergeModel | None], layers: int) -> Arguments:
        """models: None for one that the recipe does not list (a base that the rule takes as a model)."""
        own = [{} if model is None else given(model.parameters) for model in models]
        return Arguments(rule, given(parameters), own, layers)

    def weights(self, name: str) -> list[float]:
        """One weight a model: its own, else the common one, else 1."""
        return self._of_models("weight", name, 1.0)

    def params(self, name: str) -> dict[str, Any]:
        """The rule's keyword arguments for the tensor of that name."""
        found: dict[str, Any] = {}
        for key, (annotation, default) in self.rule.params.items():
            if key in PER_MODEL and "list" in annotation:
                values = self._of_models(key, name, default)
                found[key] = values[0] if len(set(values)) == 1 else values
            else:
                found[key] = self._common(key, name, default)
        return found

    def moving(self, name: str) -> list[bool]:
        """For each model, whether it changes the result."""
        params = self.params(name)
        still = any(params.get(key, 1.0) == 0 for key in _SCALES)
        return [weight != 0 and not still for weight in self.weights(name)]

    @property
    def names_matter(self) -> bool:
        """Whether some setting differs between tensors."""
        return any(isinstance(value, list) for block in (self.common, *self.own) for value in block.values())

    def _of_models(self, key: str, name: str, default: float) -> list[float]:
        common = self._common(key, name, default)
        own = [value_at(block.get(key), name, self.layers) for block in self.own]
        return [common if value is None else value for value in own]

    def _common(self, key: str, name: str, default: Any) -> Any:
        found = self.common.get(key)
        if isinstance(found, bool | str):
            return found
        value = value_at(found, name, self.layers)
        return default if value is None else value
