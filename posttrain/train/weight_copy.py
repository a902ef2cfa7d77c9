"""Copies of the trained weights that follow the policy and temporarily replace it: moving averages of its weights.

Only trained parameters are copied: with LoRA, the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.loss.decoupled import ewma_step

FILE = "proximal.safetensors"
_TOTAL = "total_weight"  # cannot clash with parameter names, which contain a dot


class WeightCopy:
    """Copy of the trained weights of `model` at construction."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[str, Tensor] = {n: w.detach().clone() for n, w in trained_parameters(model)}

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[Any]:
        """Context manager in which `model` has the copy's weights, in eval mode and without gradients."""
        saved, training = {name: weight.data for name, weight in trained_parameters(model)}, model.training
        model.eval()
        try:
            for name, weight in trained_parameters(model):
                weight.data = self.weights[name]
            with torch.no_grad():
                yield model
        finally:
            for name, weight in trained_parameters(model):
                weight.data = saved[name]
            model.train(training)


class ProximalPolicy(WeightCopy):
    """Bias-corrected moving average of the policy that `ppo_ewma` clips around, updated after every update."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay, self.total = decay, 1.0

    def follow(self, model: nn.Module) -> None:
        """Update the average with the model's weights (`ewma_step`)."""
        total = self.total
        for name, weight in trained_parameters(model):
            self.weights[name], total = ewma_step(self.weights[name], self.total, weight.detach(), self.decay)
        self.total = total

    def save(self, folder: Path) -> None:
        """Write the average into a checkpoint folder."""
        total = torch.tensor(self.total, dtype=torch.float64)
        save_file({_TOTAL: total, **{n: w.contiguous() for n, w in self.weights.items()}}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Load the average from a checkpoint folder."""
        stored = load_file(folder / FILE)
        self.total = float(stored.pop(_TOTAL))
        for name, weight in stored.items():
            self.weights[name] = weight.to(self.weights[name])


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for each parameter that requires a gradient."""
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
