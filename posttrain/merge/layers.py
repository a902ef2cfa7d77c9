"""Layer numbers from tensor names: `model.layers.3.mlp.up_proj.weight` is in layer 3 of the stack `model.layers.`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_INPUT_MODULE = re.compile(r"emb|wte|wpe|project_in")  # the input of the layers; `embed_out` is a head


def layer_of(name: str) -> tuple[str, int] | None:
    """Return (name prefix of the stack, layer number) of a tensor; None for tensors outside layers."""
    found = _LAYER.search(name)
    return (name[: found.start(1)], int(found[1])) if found else None


def replace_layer(name: str, number: int) -> str:
    """Return the name of the same tensor in another layer."""
    found = _LAYER.search(name)
    return name if found is None else f"{name[: found.start(1)]}{number}{name[found.end(1) :]}"


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers of each stack: prefix -> count."""
    counts: dict[str, int] = {}
    for layer in map(layer_of, names):
        if layer is not None:
            counts[layer[0]] = max(counts.get(layer[0], 0), layer[1] + 1)
    return counts


def precedes_layers(name: str) -> bool:
    """Return whether a tensor outside the layers precedes them (embeddings) rather than follows (norm, head)."""
    return bool(_INPUT_MODULE.search(name)) and "embed_out" not in name
