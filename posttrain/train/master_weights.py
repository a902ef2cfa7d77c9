"""AdamW with float32 master weights for a model in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW


class MasterAdamW(AdamW):
    """AdamW for half-precision weights: updates float32 master weights, then rounds them into the model.

    Its parameters are the float32 masters. Gradients are those of the model's weights, also in float32 (`grad_dtype`).
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        weights = [p for group in groups for p in group["params"]]
        masters = [nn.Parameter(self.copy_master(p.detach())) for p in weights]
        self.weight_of = {id(master): weight for master, weight in zip(masters, weights, strict=True)}
        rest = iter(masters)
        super().__init__([{**group, "params": [next(rest) for _ in group["params"]]} for group in groups], **settings)
        self.register_step_hooks()

    def register_step_hooks(self) -> None:
        """Register hooks that take the model's gradients before each step and round the weights after it."""
        self.register_step_pre_hook(MasterAdamW.take_gradients)
        self.register_step_post_hook(MasterAdamW.round_weights)

    def copy_master(self, weight: Tensor) -> Tensor:
        """Return a float32 copy of a half-precision weight."""
        return weight.float().clone()

    def pairs(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Yield each float32 master weight with the model's weight."""
        for group in self.param_groups:
            yield from ((master, self.weight_of[id(master)]) for master in group["params"])

    def take_gradients(self, *_: Any) -> None:
        """Point the gradients of the masters to those of the model's weights, before a step."""
        for master, weight in self.pairs():
            master.grad = weight.grad

    @torch.no_grad()
    def round_weights(self, *_: Any) -> None:
        """Copy the masters, rounded, into the model's weights, after a step."""
        for master, weight in self.pairs():
            master.grad = None
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, weight in self.pairs():
            if not set_to_none and weight.grad is not None:
                weight.grad.zero_()
            else:
                weight.grad = None
