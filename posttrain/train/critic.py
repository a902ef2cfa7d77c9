"""Value head (critic): one linear layer on the policy's last hidden states; its loss does not train the policy.

A separate critic would cost a second model, and a head whose loss reached the policy would change its features. The
weights start at 0: the first values are 0, and the first advantages are the returns.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.errors import RecipeError, count_noun
from posttrain.loss.value import soft_minimum
from posttrain.models.load import LoadedModel
from posttrain.path_resolution import find
from posttrain.seeds import derive

FILE = "critic.safetensors"
TWIN_INIT_STD = 0.01  # of the weights of twin heads, which would stay equal from equal initial weights


class TwinHead(nn.Linear):
    """Two value heads on the same features.

    The value is their soft minimum, which is pessimistic where they disagree (SAFE).
    """

    def __init__(self, features: int, alpha: float) -> None:
        super().__init__(features, 2)
        self.alpha = alpha

    def forward(self, states: Tensor) -> Tensor:
        """Compute values [M,1] of hidden states [M,H]."""
        first, second = super().forward(states).split(1, dim=-1)
        return soft_minimum(first, second, alpha=self.alpha)


def create_value_head(loaded: LoadedModel, *, twin: float | None = None, seed: int = 0) -> nn.Linear:
    """Create a value head for the model, in float32 on its device.

    Its weights are zero; with `twin`, two heads have small random weights.
    """
    features = loaded.model.config.get_text_config().hidden_size
    head = nn.Linear(features, 1) if twin is None else TwinHead(features, twin)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        if twin is not None:
            head.weight.normal_(0.0, TWIN_INIT_STD, generator=torch.Generator().manual_seed(derive(seed, "critic", 0)))
    return head.to(loaded.device)


def load_frozen_head(loaded: LoadedModel, path: str, base_dir: Path, *, twin: float | None = None) -> nn.Linear:
    """Load the value head of another run, or of a folder that holds one, without gradients. Raises RecipeError."""
    folder = find(path, base_dir, "critic.path", RecipeError)
    file = next((f for f in (folder / FILE, folder / "final" / FILE) if f.is_file()), None)
    if file is None:
        raise RecipeError(
            f"critic.path: no {FILE} in {folder}", hint="`loss: critic` trains one and leaves it in final/"
        )
    head = create_value_head(loaded, twin=twin)
    heads, features = load_file(file)["weight"].shape
    if features != head.in_features:
        raise RecipeError(f"critic.path: {file} reads {features} features, and {loaded.source} has {head.in_features}")
    if heads != head.out_features:
        raise RecipeError(
            f"critic.path: {file} has {count_noun(heads, 'head')}, and the recipe asks for {head.out_features}",
            hint="write the `critic.twin` of that run" if heads == 2 else "remove `critic.twin`",
        )
    load_head(head, file.parent)
    return head.requires_grad_(False)


def save_head(head: nn.Module, folder: Path) -> None:
    """Write the value head next to the weights of a checkpoint."""
    save_file({name: value.contiguous() for name, value in head.state_dict().items()}, folder / FILE)


def load_head(head: nn.Module, folder: Path) -> None:
    """Load the value head of a checkpoint in place."""
    head.load_state_dict(load_file(folder / FILE))
