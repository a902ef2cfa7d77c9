"""The opponent: a slow copy of the policy, whose answers the policy's are compared with (Nash mirror prox).

Only what is trained is copied, the adapter under LoRA. To be asked, the copy takes the place of the trained weights for
a moment; after every step it moves a little towards them.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.train.weight_copy import WeightCopy, trained_parameters

FILE = "opponent.safetensors"


class Opponent(WeightCopy):
    """A moving average of the trained weights of `model`, that begins as they are. ema: the share of the new ones."""

    def __init__(self, model: nn.Module, ema: float) -> None:
        super().__init__(model)
        self.ema = ema

    def follow(self, model: nn.Module) -> None:
        """A step towards the policy: ema * policy + (1 - ema) * opponent."""
        for name, weight in trained_parameters(model):
            self.weights[name].lerp_(weight.detach(), self.ema)

    def save(self, folder: Path) -> None:
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        for name, weight in load_file(folder / FILE).items():
            self.weights[name].copy_(weight)
