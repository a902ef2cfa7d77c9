"""Muon for the matrices of a model's layers, AdamW for all other weights (2502.16982)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from posttrain.errors import ModelError
from posttrain.train.compiled import layers_of


class MuonAdamW(Optimizer):
    """torch's Muon and AdamW as one optimizer, with one learning rate, one checkpoint and one step.

    Muon orthogonalizes the momentum of a matrix and scales it by 0.2 sqrt(the longer side): an update then has the same
    RMS as an AdamW update, so AdamW's learning rate and weight decay apply to both. matrices, others: parameter groups.
    """

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], *, lr: float, momentum: float, **adamw: Any
    ) -> None:
        self.muon = Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(others, lr=lr, **adamw)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update with each optimizer."""
        assert closure is None
        count = len(self.muon.param_groups)  # loading a checkpoint replaces groups and state
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of the layers: no embeddings, head, vectors, or experts in one 3-dimensional tensor.

    Raises ModelError if there are none.
    """
    layers = layers_of(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad and p.ndim == 2}
    matrices = [p for number, p in found.items() if number not in embeddings]
    if not matrices:
        raise ModelError("no matrix of a layer is trained", where="optim.use: muon", hint="write `optim.use: adamw`")
    return matrices
