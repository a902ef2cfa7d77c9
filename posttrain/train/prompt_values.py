"""A value head on prompts: the expected reward of a prompt, before anything is sampled (for samplers such as `pcl`).

A linear layer on the policy's last hidden state at the prompt's last token, normalised. It is trained on the means of
the groups that a step has sampled; the policy is not changed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from posttrain.curriculum.protocol import Group
from posttrain.models.load import LoadedModel
from posttrain.train import distributed

FILE = "prompt_values.pt"


class PromptValues:
    """lr, steps: of Adam, after each step of the run. metric: what the mean of a group is of."""

    def __init__(self, loaded: LoadedModel, *, lr: float, steps: int, metric: Literal["correct", "reward"]) -> None:
        width = loaded.model.get_input_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 0.5)
        self.steps, self.metric = steps, metric
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=lr)
        self._features: dict[int, Tensor] = {}  # of the prompts that were asked for since the last `learn`

    def predict(self, prompts: Sequence[int], states: Tensor) -> list[float]:
        """The values of prompts by number, the same on all ranks. states [N,H]: theirs, see `policy.prompt_states`."""
        states = states.float().cpu()
        features = nn.functional.layer_norm(states, states.shape[1:])
        self._features |= dict(zip(prompts, features, strict=True))
        with torch.no_grad():
            return distributed.broadcast_from_rank0(self.head(features)[:, 0].tolist())

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Learn from the groups of a step whose prompts were asked for; returns metrics."""
        found = [(self._features[g.prompt], target) for g in groups if g.prompt in self._features
                 and (target := g.pass_rate if self.metric == "correct" else g.mean_reward) is not None]  # fmt: skip
        self._features = {}
        if not found:
            return {}
        features, targets = torch.stack([f for f, _ in found]), torch.tensor([t for _, t in found])
        first = None
        for _ in range(self.steps):
            loss = value_loss(self.head(features)[:, 0], targets)
            first = float(loss.detach()) if first is None else first
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"sampler/value_loss": first or 0.0}

    def save(self, folder: Path) -> None:
        torch.save({"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / FILE)

    def load(self, folder: Path) -> None:
        stored = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        self.head.load_state_dict(stored["head"])
        self.optimizer.load_state_dict(stored["optimizer"])


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """mean (V - target)^2 over prompts; the paper (arXiv 2510.01135) writes a sum, which only rescales lr."""
    return (values - targets.detach()).square().mean()
