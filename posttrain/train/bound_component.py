"""Components of a recipe with their arguments bound: what an objective is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.batch import ChannelAdvantages, Credit, Remembered, RolloutBatch
from posttrain.loss.aggregate import Aggregation
from posttrain.loss.groups import group_key, group_total
from posttrain.recipe.argument_checks import check_keys
from posttrain.recipe.section import ComponentSection


@dataclass(frozen=True)
class BoundComponent:
    """One component: call it with a batch. `key` is where it stands in the recipe, e.g. `advantage_transforms.0`.

    coef and aggregation are those of terms that are added to the loss; other parts leave them alone.
    """

    kind: registry.Kind
    name: str
    key: str
    function: Callable[..., Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    coef: float = 1.0
    aggregation: Aggregation | None = None

    def __call__(self, batch: RolloutBatch, *logp: Tensor) -> Any:
        return self.function(batch, *logp, **self.params)

    def at(self, numbers: Mapping[str, float]) -> BoundComponent:
        """The same with the numbers that controllers give to its keys (`advantage_transforms.0.alpha`, `kl.coef`)."""
        mine = {k.removeprefix(f"{self.key}."): v for k, v in numbers.items() if k.rpartition(".")[0] == self.key}
        if not mine:
            return self
        params = {k: _like(v, mine[k]) if k in mine else v for k, v in self.params.items()}
        return dataclasses.replace(self, params=params, coef=mine.get("coef", self.coef))

    def call_and_remember(self, batch: RolloutBatch) -> tuple[Any, RolloutBatch]:
        """The result, and the batch with what the part wants to know again in the next step."""
        result = self(batch)
        if not isinstance(result, Remembered):
            return result, batch
        return result.result, batch.replace(memory={**batch.memory, self.name: result.memory})


def _like(before: Any, number: float) -> float:
    return round(number) if isinstance(before, int) else number


def bind(key: str, section: ComponentSection, base_dir: Path | None) -> BoundComponent:
    """The part of a recipe section. Raises UserError for a name or argument that does not exist."""
    component = registry.resolve(section.kinds, section.use, base_dir)
    check_keys(component, section)
    return BoundComponent(
        kind=component.kind,  # type: ignore[arg-type]
        name=component.name,
        key=key,
        function=component.function,
        params=section.params,
        needs=frozenset(component.needs),
        coef=getattr(section, "coef", 1.0),
        aggregation=getattr(section, "aggregation", None),
    )


def with_advantages(batch: RolloutBatch, result: Any) -> RolloutBatch:
    """The batch with what an advantage, a transform or a credit assignment returned, constant for the gradient."""
    match result:
        case Credit():
            return batch.replace(advantages=result.advantages.detach(), returns=result.returns.detach())
        case ChannelAdvantages():
            return batch.replace(advantages=result.total.detach(), channels=result.channels)
    return batch.replace(advantages=result.detach())


def token_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens of a statistic [N,T], or [N] that holds for every token of its row."""
    spread = value if value.dim() == 2 else value[:, None].expand(mask.shape)
    return torch.where(mask, spread, 0.0).sum()


def group_tokens(batch: RolloutBatch) -> Tensor:
    """Trained tokens [K] of each group, in order of first appearance."""
    return group_total(batch.mask.sum(-1), *group_key(batch.group_ids))


def scatter_kept(values: Tensor | None, kept: Tensor) -> Tensor | None:
    """Values of the kept rows at their places among all rows; 0 elsewhere."""
    if values is None:
        return None
    everywhere = values.new_zeros((len(kept), *values.shape[1:]))
    everywhere[kept] = values
    return everywhere


def like_rows(factor: Tensor, advantages: Tensor) -> Tensor:
    """A factor [N] in a shape that multiplies advantages [N] or [N,T]."""
    return factor[:, None] if factor.dim() < advantages.dim() else factor
