"""Per-tensor weights and keyword arguments of a merge rule, resolved from the recipe's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.merge.layer_values import value_at
from posttrain.recipe.merge_sections import MergeParameters
from posttrain.recipe.merging import PER_MODEL, UNWEIGHTED, given_parameters
from posttrain.registry import Component

_ROUNDING_ERROR = 1e-8  # |sum of weights - expected sum| below this is rounding error
# Rule -> its argument for which 0 makes the result equal to the anchor, whatever the models contain
_ZERO_GIVES_ANCHOR = {"update_selective": "scale", "reasoning_vector": "alpha", "slerp": "t", "nearswap": "t"}


@dataclass(frozen=True)
class TensorPosition:
    """Position of an output tensor: its name, its name in each model, and the relative depth of its layer.

    inputs: the tensor's name in each model. depth: of its layer within its slice, 0 to 1.
    """

    name: str
    inputs: Sequence[str]
    depth: float = 0.0


@dataclass(frozen=True)
class Arguments:
    """Merge settings of one slice of the output.

    common: settings for all models; the first block with a value for the key wins. own: settings of each model.
    """

    rule: Component
    common: Sequence[dict[str, Any]]
    own: Sequence[dict[str, Any]]

    @staticmethod
    def of(rule: Component, common: Sequence[MergeParameters], own: Sequence[MergeParameters]) -> Arguments:
        """Build the settings of a rule from the recipe's parameter blocks.

        common: the settings of a slice, followed by those of the merge. own: the settings of each model passed to the
        rule.
        """
        return Arguments(
            rule,
            [given_parameters(values, rule.name) for values in common],
            [given_parameters(values, rule.name) for values in own],
        )

    def weights(self, position: TensorPosition) -> list[float]:
        """Return one weight per model: its own, else the common one, else 1. Rules without weights get 1."""
        if self.rule.name in UNWEIGHTED:
            return [1.0] * len(self.own)
        return self._per_model("weight", position, 1.0)

    def params(self, position: TensorPosition) -> dict[str, Any]:
        """Return the rule's keyword arguments for a tensor."""
        params: dict[str, Any] = {}
        for key, (annotation, default) in self.rule.params.items():
            if key in PER_MODEL and "list" in annotation:
                values = self._per_model(key, position, default)
                params[key] = values[0] if len(set(values)) == 1 else values
            else:
                params[key] = self._common_value(key, position.name, position.depth, default)
        return params

    def contributing_models(self, position: TensorPosition) -> list[bool]:
        """Return for each model whether it can change the result."""
        params = self.params(position)
        is_anchor = params.get("lam", 1.0) == 0 or params.get(_ZERO_GIVES_ANCHOR.get(self.rule.name, ""), 1.0) == 0
        return [weight != 0 and not is_anchor for weight in self.weights(position)]

    def rescales(self, position: TensorPosition) -> bool:
        """Return whether equal inputs give a different output because all values are multiplied by a factor."""
        params = self.params(position)
        if self.rule.name == "passthrough":
            return bool(params["scale"] != 1)
        summed = {"linear": "normalize", "multislerp": "normalize_weights"}.get(self.rule.name)
        return summed is not None and not params[summed] and abs(sum(self.weights(position)) - 1) > _ROUNDING_ERROR

    @property
    def names_matter(self) -> bool:
        """Whether any setting differs between tensors."""
        return any(isinstance(value, list) for block in (*self.common, *self.own) for value in block.values())

    def _per_model(self, key: str, position: TensorPosition, default: Any) -> list[Any]:
        values = []
        for block, name in zip(self.own, position.inputs, strict=True):
            value = value_at(block.get(key), name, position.depth)
            values.append(self._common_value(key, name, position.depth, default) if value is None else value)
        return values

    def _common_value(self, key: str, name: str, depth: float, default: Any) -> Any:
        """Return the value of a common setting for one tensor: the first block with a value wins."""
        for block in self.common:
            setting = block.get(key)
            value = setting if isinstance(setting, bool | str) else value_at(setting, name, depth)
            if value is not None:
                return value
        return default
