"""torch's allocator settings: set on GPUs only, keep the user's settings, and are reverted on failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.train import machine_checks


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(machine_checks, "set_allocator", found.append)
    for name in machine_checks.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


CUDA = torch.device("cuda")


def allocating(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def empty(*_: Any, **__: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch, "empty", empty)


def test_expandable_segments_are_set_on_gpus_only(changes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    allocating(monkeypatch, None)
    assert not machine_checks.use_expandable_segments(torch.device("cpu")) and not changes
    assert machine_checks.use_expandable_segments(CUDA) and changes == ["expandable_segments:True"]


@pytest.mark.parametrize("name", machine_checks.ALLOCATOR_VARIABLES)
def test_settings_of_the_user_are_kept(changes: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert not machine_checks.use_expandable_segments(CUDA) and not changes


def test_driver_without_memory_mapping_keeps_the_default(changes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    allocating(monkeypatch, RuntimeError("CUDA driver error: operation not supported"))
    assert not machine_checks.use_expandable_segments(CUDA)
    assert changes == ["expandable_segments:True", "expandable_segments:False"]
    allocating(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        machine_checks.use_expandable_segments(CUDA)
