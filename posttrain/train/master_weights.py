"""AdamW for a model in half precision, whose exact weights are the optimiser's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW


class MasterAdamW(AdamW):
    """AdamW for weights in half precision: it keeps them in float32 and updates those, and then rounds.

    Its parameters are the float32 ones. Gradients are those of the model's weights, in float32 too (`grad_dtype`).
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        weights = [p for group in groups for p in group["params"]]
        masters = [nn.Parameter(self.copy_master(p.detach())) for p in weights]
        self.weight_of = {id(master): weight for master, weight in zip(masters, weights, strict=True)}
        places = iter(masters)
        super().__init__([{**group, "params": [next(places) for _ in group["params"]]} for group in groups], **settings)
        self.surround_steps()

    def surround_steps(self) -> None:
        """Have gradients taken before each step, and weights rounded after it."""
        self.register_step_pre_hook(MasterAdamW.take_gradients)
        self.register_step_post_hook(MasterAdamW.round_weights)

    def copy_master(self, weight: Tensor) -> Tensor:
        """The float32 weight of one in half precision."""
        return weight.float().clone()

    def pairs(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Each float32 weight, and the one of the model."""
        for group in self.param_groups:
            yield from ((master, self.weight_of[id(master)]) for master in group["params"])

    def take_gradients(self, *_: Any) -> None:
        """Before a step: the gradients are those of the model's weights."""
        for master, weight in self.pairs():
            master.grad = weight.grad

    @torch.no_grad()
    def round_weights(self, *_: Any) -> None:
        """After a step: the model's weights are the float32 ones, rounded."""
        for master, weight in self.pairs():
            master.grad = None
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, weight in self.pairs():
            if not set_to_none and weight.grad is not None:
                weight.grad.zero_()
            else:
                weight.grad = None
