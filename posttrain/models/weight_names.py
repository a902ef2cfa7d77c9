"""Weight names: those of a model's modules, and those of its architecture's published checkpoints.

transformers stores and computes some architectures differently: Mixtral's experts are one tensor per layer in memory
and one per expert in its checkpoints; GPT-NeoX's head is `lm_head` in memory and `embed_out` in checkpoints. Folders
that posttrain writes and weights that engines load have published names; parameters, gradients and optimizer states
have module names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from posttrain.errors import ModelError

# transformers 5 removed one level from CLIP's and SigLIP's names, and does not restore it on saving.
_TOWER = re.compile(r"^((?:model\.)?vision_tower\.)(?=(?:embeddings|encoder|pre_layrnorm|post_layernorm|head)\.)")
_LAYER = re.compile(r"^.*?\.\d+\.")  # up to the first number: conversions combine tensors of one layer


def save_under_published_names(model: Any) -> Any:
    """Make `model.save_pretrained` write published names, whatever names the model was loaded from; return it."""
    model._weight_conversions = None  # otherwise only names changed on loading are changed back
    return model


def to_published_names(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights from module names to published names. Pass tied weights once, or they are returned twice."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(save_under_published_names(model), dict(state))
    return found


def published_stream(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `to_published_names` of weights in module order, one layer at a time; vision towers get the names engines
    read.
    """
    for _, group in groupby(weights, lambda item: layer_of(item[0])):
        for name, weight in to_published_names(model, dict(group)).items():
            yield _TOWER.sub(r"\1vision_model.", name), weight


def layer_of(name: str) -> str:
    """Return a weight's name up to its layer; empty for weights outside layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def class_of(model: Any) -> Any:
    """Return the model's own class: FSDP replaces the class of a sharded model by a subclass."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def read(model: Any, folder: Path) -> dict[str, Tensor]:
    """Read the weights of a model folder by module names, float32 on the CPU; tied weights appear under each name.

    Raises ModelError if the folder holds another model, and transformers' errors if it cannot be read.
    """
    loaded, info = class_of(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing, unknown = (sorted(info[key])[:3] for key in ("missing_keys", "unexpected_keys"))
    if missing or unknown:
        raise ModelError(f"the weights do not match: missing {missing}, unexpected {unknown}", where=str(folder))
    return dict(loaded.state_dict())
