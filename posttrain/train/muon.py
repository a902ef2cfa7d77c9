"""Muon for the matrices of a model's layers, AdamW for all else (2502.16982)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from posttrain.errors import ModelError
from posttrain.train.compiled import layers_of


class MuonAdamW(Optimizer):
    """torch's two optimisers as one, so that there is one learning rate, one checkpoint and one step.

    Muon makes the momentum of a matrix orthogonal and scales it by 0.2 sqrt(the longer side): then an update is as long
    as one of AdamW, whose learning rate and weight decay hold for both. matrices, others: groups of parameters.
    """

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], *, lr: float, momentum: float, **adamw: Any
    ) -> None:
        self.muon = Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(others, lr=lr, **adamw)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update by each."""
        assert closure is None
        count = len(self.muon.param_groups)  # groups and state are other objects once a checkpoint was loaded
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of the layers: no embeddings, no head, no vectors, no experts in one tensor of three
    dimensions. Raises ModelError where there are none."""
    layers = layers_of(model)
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad and p.ndim == 2}
    kept = [p for number, p in found.items() if number not in looked_up]
    if not kept:
        raise ModelError("no matrix of a layer is trained", where="optim.use: muon", hint="write `optim.use: adamw`")
    return kept
