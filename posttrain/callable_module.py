"""Callable packages: `posttrain.merge` is a package, and `posttrain.merge(recipe)` runs a recipe."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


def make_callable(name: str, target: str) -> None:
    """Make the imported module `name` callable: a call runs `module:function`, imported at the first call."""
    module, _, function = target.partition(":")

    class CallableModule(ModuleType):
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return getattr(importlib.import_module(module), function)(*arguments, **named)

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(getattr(importlib.import_module(module), function))

    sys.modules[name].__class__ = CallableModule
