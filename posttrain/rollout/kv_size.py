"""How many bytes vLLM's KV cache had when an equal engine was last started on such a GPU.

vLLM finds it out by a pass on made-up tokens, and takes all memory that other processes allocate meanwhile for its own.
With the number it need not: it starts sooner, and may start while the trainer works on the same GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain.run.environment import package_version

FOLDER = "posttrain-kv"  # in vLLM's cache


def known_size(arguments: Mapping[str, Any], folder: Path, cache: Path) -> dict[str, int]:
    """The engine argument that says how large the KV cache is; none if it is not known, and vLLM measures it.

    arguments: the others, for the model in `folder`. cache: vLLM's own folder.
    """
    if not torch.cuda.is_available():
        return {}
    try:
        size = int(file_of(arguments, folder, cache).read_text())
    except (OSError, ValueError):
        return {}
    return {"kv_cache_memory_bytes": size} if size > 0 else {}


def remember(arguments: Mapping[str, Any], folder: Path, cache: Path, size: int) -> None:
    """Keep what vLLM measured. Where that cannot be written, it measures again next time."""
    file = file_of(arguments, folder, cache)
    new = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(str(size))
        new.replace(file)
    except OSError:
        return


def forget(arguments: Mapping[str, Any], folder: Path, cache: Path) -> None:
    """Have vLLM measure again next time: it did not start with the size that is known, if one is."""
    if torch.cuda.is_available():
        with contextlib.suppress(OSError):
            file_of(arguments, folder, cache).unlink()


def file_of(arguments: Mapping[str, Any], folder: Path, cache: Path) -> Path:
    """Where the number is kept. Its name depends on all that the number depends on."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    depends = {
        "arguments": {key: value for key, value in arguments.items() if key != "model"},
        "config": (folder / "config.json").read_text(),
        "gpu": [gpu.name, gpu.total_memory],
        "versions": [torch.__version__, package_version("vllm")],
        "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
    }
    return cache / FOLDER / hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
