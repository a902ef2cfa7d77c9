"""Size of vLLM's KV cache in bytes, stored for the next start of an equal engine on an equal GPU.

vLLM finds the size by a forward pass on dummy tokens, and counts all memory that other processes allocate meanwhile as
its own. With a known size it measures nothing: it starts sooner, and may start while the trainer works on the same GPU.
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

FOLDER = "posttrain-kv"  # in vLLM's cache folder


def file_for(arguments: Mapping[str, Any], folder: Path, cache: Path) -> Path:
    """Return the file that stores the size, named by a hash of everything that the size depends on.

    arguments: vLLM's engine arguments. folder: the model's folder, of which config.json counts and the path does not.
    cache: vLLM's cache folder.
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    depends = {
        "arguments": {key: value for key, value in arguments.items() if key != "model"},
        "config": (folder / "config.json").read_text(),
        "gpu": [gpu.name, gpu.total_memory],
        "versions": [torch.__version__, package_version("vllm")],
        "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
    }
    return cache / FOLDER / hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]


def read(file: Path | None) -> int | None:
    """Return the stored size; None if the file is missing or broken, so that vLLM measures again."""
    try:
        size = 0 if file is None else int(file.read_text())
    except (OSError, ValueError):
        return None
    return size if size > 0 else None


def write(file: Path, size: int) -> None:
    """Store the size. Errors are ignored: vLLM then measures again at the next start."""
    new = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(str(size))
        new.replace(file)
