"""posttrain: post-train reasoning LLMs from YAML recipes. Heavy libraries are imported on first use.

import posttrain as pt
run = pt.rl("recipe.yaml", optim={"lr": 1e-6})
run.metrics["reward"]
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.api import Run as Run
    from posttrain.api import dpo as dpo
    from posttrain.api import generate as generate
    from posttrain.api import harness as harness
    from posttrain.api import load_recipe as load_recipe
    from posttrain.api import reward_model as reward_model
    from posttrain.api import rl as rl
    from posttrain.api import sft as sft
    from posttrain.errors import PosttrainError as PosttrainError

__version__ = "0.1.0"

_API_NAMES = ("Run", "dpo", "generate", "harness", "load_recipe", "reward_model", "rl", "sft")
_CALLABLE_PACKAGES = ("evaluate", "export", "merge")  # callable packages
__all__ = ["PosttrainError", *_API_NAMES, *_CALLABLE_PACKAGES]

_process = sys.modules.get("multiprocessing.process")  # already imported in a process that multiprocessing started
if _process is not None and _process.current_process().name.startswith("EngineCore"):
    from posttrain.rollout import engine_process

    engine_process.begin()  # vLLM's engine process imports posttrain before vllm


def __getattr__(name: str) -> Any:
    """Import a part of the Python interface at its first use."""
    if name in _API_NAMES:
        return getattr(importlib.import_module("posttrain.api"), name)
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"posttrain.{name}")
    if name == "PosttrainError":
        return importlib.import_module("posttrain.errors").PosttrainError
    if name == "train":  # the package of the training loops; calling it raises an error with the right function
        return importlib.import_module("posttrain.train")
    if name.startswith("_"):
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    meant = "evaluate" if name == "eval" else importlib.import_module("posttrain.errors").nearest(name, __all__)
    hint = f"; did you mean `posttrain.{meant}`?" if meant else f"; it has {', '.join(__all__)}"
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
