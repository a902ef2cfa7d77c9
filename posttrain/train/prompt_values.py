"""Value head on prompts: the expected reward of a prompt before anything is sampled (for samplers such as `pcl`).

A linear layer on the policy's normalized last hidden state at the prompt's last token. It is trained on the mean
rewards of the groups sampled in a step; the policy does not change.
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
    """Value head with its optimizer.

    lr, steps: of Adam, after each step of the run. metric: the quantity whose group mean is predicted.
    """

    def __init__(self, loaded: LoadedModel, *, lr: float, steps: int, metric: Literal["correct", "reward"]) -> None:
        width = loaded.model.get_input_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 0.5)
        self.steps, self.metric = steps, metric
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=lr)
        self._features: dict[int, Tensor] = {}  # by prompt, of those predicted since the last `learn`

    def predict(self, prompts: Sequence[int], states: Tensor) -> list[float]:
        """Return the values of prompts, the same on all ranks.

        prompts: their indices. states [N,H]: their hidden states (`policy.prompt_states`).
        """
        states = states.float().cpu()
        features = nn.functional.layer_norm(states, states.shape[1:])
        self._features |= dict(zip(prompts, features, strict=True))
        with torch.no_grad():
            return distributed.broadcast_from_rank0(self.head(features)[:, 0].tolist())

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train on the groups of a step whose prompts were predicted; return metrics."""
        examples = [(self._features[g.prompt], target) for g in groups if g.prompt in self._features
                 and (target := g.pass_rate if self.metric == "correct" else g.mean_reward) is not None]  # fmt: skip
        self._features = {}
        if not examples:
            return {}
        features, targets = torch.stack([f for f, _ in examples]), torch.tensor([t for _, t in examples])
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
    """Compute mean (V - target)^2 over prompts [N] -> scalar.

    The paper (arXiv 2510.01135) writes a sum, which only rescales lr.
    """
    return (values - targets.detach()).square().mean()
