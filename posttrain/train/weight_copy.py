"""Copies of the trained weights that temporarily replace those of the policy: opponent, proximal policy, reference.

Only trained parameters are copied: with LoRA, the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.loss.decoupled import ewma_step

_TOTAL = "total_weight"  # cannot clash with parameter names, which contain a dot


class WeightCopy:
    """Copy of the trained weights of `model` at construction. file: its name in a checkpoint folder."""

    file: ClassVar[str]

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

    def save(self, folder: Path) -> None:
        """Write the copy into a checkpoint folder."""
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, folder / self.file)

    def load(self, folder: Path) -> None:
        """Load the copy from a checkpoint folder in place."""
        for name, weight in load_file(folder / self.file).items():
            self.weights[name].copy_(weight)


class Opponent(WeightCopy):
    """Slow copy of the policy, whose answers the policy's answers are compared with (Nash mirror prox).

    It is the exponential moving average of the trained weights of `model`. ema: weight of the new values.
    """

    file = "opponent.safetensors"

    def __init__(self, model: nn.Module, ema: float) -> None:
        super().__init__(model)
        self.ema = ema

    def follow(self, model: nn.Module) -> None:
        """Update towards the policy after a step: ema * policy + (1 - ema) * opponent."""
        for name, weight in trained_parameters(model):
            self.weights[name].lerp_(weight.detach(), self.ema)


class ProximalPolicy(WeightCopy):
    """Bias-corrected moving average of the policy that `ppo_ewma` clips around, updated after every update."""

    file = "proximal.safetensors"

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
        total = torch.tensor(self.total, dtype=torch.float64)
        save_file({_TOTAL: total, **{n: w.contiguous() for n, w in self.weights.items()}}, folder / self.file)

    def load(self, folder: Path) -> None:
        stored = load_file(folder / self.file)
        self.total = float(stored.pop(_TOTAL))
        for name, weight in stored.items():
            self.weights[name].copy_(weight)


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for each parameter that requires a gradient."""
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
