"""The opponent: a slow copy of the policy, whose answers the policy's are compared with (Nash mirror prox).

Only what is trained is copied, the adapter under LoRA. To be asked, the copy takes the place of the trained weights for
a moment; after every step it moves a little towards them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "opponent.safetensors"


class Opponent:
    """A moving average of the trained weights of `model`, that begins as they are. ema: the share of the new ones."""

    def __init__(self, model: nn.Module, ema: float) -> None:
        self.ema = ema
        self.weights: dict[str, Tensor] = {n: w.detach().clone() for n, w in _trained_parameters(model)}

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[Any]:
        """Inside, `model` is the opponent, without gradients and dropout; afterwards it is itself again."""
        kept, training = {name: weight.data for name, weight in _trained_parameters(model)}, model.training
        model.eval()
        try:
            for name, weight in _trained_parameters(model):
                weight.data = self.weights[name]
            with torch.no_grad():
                yield model
        finally:
            for name, weight in _trained_parameters(model):
                weight.data = kept[name]
            model.train(training)

    def follow(self, model: nn.Module) -> None:
        """A step towards the policy: ema * policy + (1 - ema) * opponent."""
        for name, weight in _trained_parameters(model):
            self.weights[name].lerp_(weight.detach(), self.ema)

    def save(self, folder: Path) -> None:
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        for name, weight in load_file(folder / FILE).items():
            self.weights[name].copy_(weight)


def _trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
