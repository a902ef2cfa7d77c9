"""Cached size of vLLM's KV cache: reused by an equal engine only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import kv_size, vllm_start
from posttrain.rollout.vllm_start import EngineSpec


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    card = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    return card


def model(folder: Path, config: str = '{"hidden_size": 8}') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    return folder


def engine_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": str(folder), "gpu_memory_utilization": 0.2, "max_model_len": 64, **changes}


def test_size_is_reused_only_by_an_equal_engine(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def size(folder: Path, **changes: Any) -> int | None:
        return kv_size.read(kv_size.file_for(engine_settings(folder, **changes), folder, tmp_path / "cache"))

    folder = model(tmp_path / "run-1")
    assert size(folder) is None
    kv_size.write(kv_size.file_for(engine_settings(folder), folder, tmp_path / "cache"), 12345)
    again = model(tmp_path / "run-2")  # of another run
    assert size(again) == 12345
    for changes in ({"gpu_memory_utilization": 0.3}, {"max_model_len": 65}, {"enable_lora": True}):
        assert size(again, **changes) is None
    assert size(model(tmp_path / "run-3", '{"hidden_size": 16}')) is None
    gpu.total_memory -= 1
    assert size(again) is None
    gpu.total_memory += 1
    monkeypatch.setattr(kv_size, "package_version", lambda _: "0.99")
    assert size(again) is None


def test_unreadable_or_unwritable_cache_gives_no_size(tmp_path: Path) -> None:
    assert kv_size.read(None) is None
    file = tmp_path / "cache" / "size"
    kv_size.write(file, 7)
    assert kv_size.read(file) == 7 and list(file.parent.iterdir()) == [file]
    for content in ("", "many", "-1"):
        file.write_text(content)
        assert kv_size.read(file) is None
    (tmp_path / "file").write_text("")
    kv_size.write(tmp_path / "file" / "size", 7)
    assert kv_size.read(tmp_path / "file" / "size") is None


@pytest.mark.usefixtures("gpu")
def test_engine_starts_beside_the_trainer_if_the_size_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first start, not if the engine needs memory that the trainer uses in between, and not without a
    GPU."""
    monkeypatch.setattr(vllm_start, "cache_folder", lambda: tmp_path / "cache")
    folder = model(tmp_path / "run")
    spec, sleeps = (EngineSpec(Vllm(sleep=sleep), torch.bfloat16, 64, None, (1,)) for sleep in (False, True))
    vllm_start.remember_kv_size(spec, folder, [None])
    assert not vllm_start.starts_beside(spec, folder)
    for one in (spec, sleeps):
        vllm_start.remember_kv_size(one, folder, [None, 101, 99])
    assert kv_size.read(vllm_start.kv_size_file(spec, folder)) == 99
    assert vllm_start.starts_beside(spec, folder) and not vllm_start.starts_beside(sleeps, folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not vllm_start.starts_beside(spec, folder)
