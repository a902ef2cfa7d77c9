"""Shortcuts through libraries for tests: work that every load, seed or save repeats and that changes no result."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any


def shorten_library_calls(replace: Callable[[Any, str, Any], None]) -> None:
    """Together a tenth of a tiny run of SFT. replace: `setattr`, or that of a monkeypatch.

    transformers formats a configuration for a log line that is not shown; accelerate reads the metadata of packages
    at every step; peft compiles the template of its model card at every save; without a CUDA device, torch keeps a
    stack trace of every call of `manual_seed` for a device that never comes.
    """
    import jinja2
    import torch
    from accelerate.utils import imports
    from transformers import configuration_utils

    search = imports._is_package_available

    @functools.cache
    def has_package(find_spec: Any, *names: str) -> bool:  # noqa: ARG001
        """find_spec: that of importlib, or what a test has in its place; part of the key."""
        return bool(search(*names))

    replace(configuration_utils.PreTrainedConfig, "__repr__", object.__repr__)
    replace(imports, "_is_package_available", lambda *names: has_package(importlib.util.find_spec, *names))
    replace(jinja2.Environment, "compile", functools.cache(jinja2.Environment.compile))
    for device in (torch.cuda, torch.xpu):
        if not device.is_available():
            replace(device, "manual_seed_all", lambda _: None)
