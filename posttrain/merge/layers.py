"""Layers by the names of their tensors: `model.layers.3.mlp.up_proj.weight` is of layer 3 of `model.layers.`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_BEFORE = re.compile(r"emb|wte|wpe|project_in")  # what the layers get; `embed_out` is a head


def layer_of(name: str) -> tuple[str, int] | None:
    """(what its stack's names begin with, number) of the layer that a tensor belongs to; None outside of layers."""
    found = _LAYER.search(name)
    return (name[: found.start(1)], int(found[1])) if found else None


def in_layer(name: str, number: int) -> str:
    """The name of the same tensor of another layer."""
    found = _LAYER.search(name)
    return name if found is None else f"{name[: found.start(1)]}{number}{name[found.end(1) :]}"


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """Stack -> how many layers the names count."""
    found: dict[str, int] = {}
    for layer in map(layer_of, names):
        if layer is not None:
            found[layer[0]] = max(found.get(layer[0], 0), layer[1] + 1)
    return found


def comes_before(name: str) -> bool:
    """Whether a tensor outside of the layers comes before them (embeddings), and not after them (norm, head)."""
    return bool(_BEFORE.search(name)) and "embed_out" not in name
