"""The value head: one linear layer on the policy's last hidden states, which its loss does not change.

A critic of its own would cost a second model; a head whose loss reached the policy would pull on what the policy
knows. It starts at 0: the first values say nothing, and the first advantages are the returns.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.errors import RecipeError
from posttrain.models.load import LoadedModel
from posttrain.path_resolution import find

FILE = "critic.safetensors"


def value_head(loaded: LoadedModel) -> nn.Linear:
    """A head for this model, all zeros, in float32 on its device."""
    head = nn.Linear(loaded.model.config.get_text_config().hidden_size, 1)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    return head.to(loaded.device)


def frozen_head(loaded: LoadedModel, path: str, base_dir: Path) -> nn.Linear:
    """The head of another run, or of a folder that holds one, without gradients. Raises RecipeError."""
    folder = find(path, base_dir, "critic.path", RecipeError)
    file = next((f for f in (folder / FILE, folder / "final" / FILE) if f.is_file()), None)
    if file is None:
        raise RecipeError(
            f"critic.path: no {FILE} in {folder}", hint="`loss: critic` trains one and leaves it in final/"
        )
    head = value_head(loaded)
    theirs, ours = load_file(file)["weight"].shape[1], head.in_features
    if theirs != ours:
        raise RecipeError(f"critic.path: {file} reads {theirs} features, and {loaded.source} has {ours}")
    load_head(head, file.parent)
    return head.requires_grad_(False)


def save_head(head: nn.Module, folder: Path) -> None:
    """Write the head beside the weights of a checkpoint."""
    save_file({name: value.contiguous() for name, value in head.state_dict().items()}, folder / FILE)


def load_head(head: nn.Module, folder: Path) -> None:
    """Load the head of a checkpoint in place."""
    head.load_state_dict(load_file(folder / FILE))
