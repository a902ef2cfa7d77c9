"""Names of weights: those of a model's modules, and those of its architecture's published checkpoints.

transformers stores and computes some architectures differently: Mixtral's experts are one tensor a layer in memory and
one an expert in its checkpoints, GPT-NeoX's head is `lm_head` here and `embed_out` there. Folders that posttrain writes
and weights that engines load have the published names; parameters, gradients and optimisers have those of the modules.
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

# transformers 5 has taken one level out of CLIP's and SigLIP's names, and does not put it back where it saves.
_TOWER = re.compile(r"^((?:model\.)?vision_tower\.)(?=(?:embeddings|encoder|pre_layrnorm|post_layernorm|head)\.)")
_LAYER = re.compile(r"^.*?\.\d+\.")  # up to the first number: conversions put together tensors of one layer


def save_under_published_names(model: Any) -> Any:
    """Have `model.save_pretrained` write published names, whatever names the model was loaded from; returns it."""
    model._weight_conversions = None  # else only what was renamed on loading is renamed back
    return model


def to_published_names(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of `model`'s modules as weights by published names. Tied ones once, or they come twice."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(save_under_published_names(model), dict(state))
    return found


def published_stream(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`to_published_names` of weights in the order of the modules, a layer at a time; of a vision tower as engines read
    them."""
    for _, group in groupby(weights, lambda item: layer_of(item[0])):
        for name, weight in to_published_names(model, dict(group)).items():
            yield _TOWER.sub(r"\1vision_model.", name), weight


def layer_of(name: str) -> str:
    """The part of a weight's name up to its layer; empty for weights outside of layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def class_of(model: Any) -> Any:
    """The model's own class; one that is divided among ranks has a class made for it, after its own."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def read(model: Any, folder: Path) -> dict[str, Tensor]:
    """The weights of a model folder by the names of `model`'s modules, float32 on the CPU; tied ones by each name.

    Raises ModelError where the folder is of another model, and what transformers raises for one that it cannot read.
    """
    loaded, info = class_of(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing, unknown = (sorted(info[key])[:3] for key in ("missing_keys", "unexpected_keys"))
    if missing or unknown:
        raise ModelError(f"it holds other weights: missing {missing}, unexpected {unknown}", where=str(folder))
    return dict(loaded.state_dict())
