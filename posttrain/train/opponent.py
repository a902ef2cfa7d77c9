"""Opponent: a slow copy of the policy, whose answers the policy's answers are compared with (Nash mirror prox).

Only trained weights are copied, under LoRA the adapter. To sample, the copy temporarily replaces the trained weights;
after every step it moves towards them.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.train.weight_copy import WeightCopy, trained_parameters

FILE = "opponent.safetensors"


class Opponent(WeightCopy):
    """Exponential moving average of the trained weights of `model`. ema: weight of the new values."""

    def __init__(self, model: nn.Module, ema: float) -> None:
        super().__init__(model)
        self.ema = ema

    def follow(self, model: nn.Module) -> None:
        """Update towards the policy: ema * policy + (1 - ema) * opponent."""
        for name, weight in trained_parameters(model):
            self.weights[name].lerp_(weight.detach(), self.ema)

    def save(self, folder: Path) -> None:
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        for name, weight in load_file(folder / FILE).items():
            self.weights[name].copy_(weight)
