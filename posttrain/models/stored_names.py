"""Names of a model's modules, from its files on this machine. Without torch, for checks before a run."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from posttrain import hub
from posttrain.errors import PosttrainError
from posttrain.models import adapters
from posttrain.models.model_paths import Place, locate

TINY = ("down_proj", "embed_tokens", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
TINY_VISION = (*TINY, "fc1", "fc2", "linear_1", "linear_2", "out_proj", "patch_embedding", "position_embedding")
MAX_HEADER_BYTES = 100_000_000


def list_module_names(place: Place) -> frozenset[str]:
    """Return the last name parts of a model's modules with weights (`q_proj`); empty if they cannot be determined.

    Empty for models with experts: their weights are stored under other names than their modules have.
    """
    if place.kind == "tiny":
        return frozenset(TINY_VISION if place.name == "tiny-vision" else TINY)
    folder = hub.find_snapshot(place.name) if place.kind == "hub" else place.path if place.kind == "directory" else None
    if folder is None:
        return frozenset()
    try:
        names = _read_weight_names(folder)
    except (OSError, ValueError, KeyError, struct.error):  # reported when the model is loaded
        return frozenset()
    if any("expert" in name for name in names):
        return frozenset()
    modules = {parts[-2] for name in names if len(parts := name.split(".")) > 1 and not parts[-2].isdigit()}
    return frozenset({*modules, "lm_head"} if modules else ())


def reads_images(name: str, base_dir: Path) -> bool:
    """Return whether a model reads images, according to its files; True if that cannot be determined."""
    try:
        place = locate(name, base_dir)
        place = locate(adapters.base_of(place.path), base_dir) if place.kind == "adapter" and place.path else place
        if place.kind in ("tiny", "gguf"):
            return place.name == "tiny-vision"
        folder = hub.find_snapshot(place.name) if place.kind == "hub" else place.path
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (PosttrainError, OSError, ValueError):  # reported when the model is checked
        return True
    return config is None or "vision_config" in config


def _read_weight_names(folder: Path) -> list[str]:
    """Return the weight names in a folder, from its index or from the header of its one file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    file = folder / "model.safetensors"
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError("no header")
        return [name for name in json.loads(stream.read(length)) if name != "__metadata__"]
