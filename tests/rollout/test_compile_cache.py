"""vLLM's compile cache: equal models get equal paths, and settings of torch's compiler are restored after a start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor

from posttrain.errors import EngineError
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import compile_cache, engine_process, vllm_start
from posttrain.rollout.compile_cache import stable_path


def model(folder: Path, size: int = 8) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": size}))
    return folder


def test_equal_models_of_two_runs_have_one_path(tmp_path: Path) -> None:
    folders = [model(tmp_path / "a run" / "m"), model(tmp_path / "another" / "m")]
    found = []
    for folder in folders:
        with stable_path(folder, tmp_path / "cache", 0) as path:
            found.append(path)
            assert path.resolve() == folder and (path / "config.json").is_file()
        assert not path.is_symlink(), "nobody finds a model of a run that has ended"
    assert found[0] == found[1]
    with stable_path(model(tmp_path / "wider", 16), tmp_path / "cache", 0) as path:
        assert path not in found
    with stable_path(folders[0], tmp_path / "cache", 1) as path:
        assert path not in found, "each rank compiles for itself"


def test_concurrent_starts_have_separate_links(tmp_path: Path) -> None:
    first, second = model(tmp_path / "1"), model(tmp_path / "2")
    with stable_path(first, tmp_path / "cache", 0) as one, stable_path(second, tmp_path / "cache", 0) as other:
        assert one != other
        assert one.resolve() == first and other.resolve() == second


def test_link_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    with stable_path(model(tmp_path / "1"), tmp_path / "cache", 0) as path:
        pass
    path.symlink_to(tmp_path / "gone")
    with stable_path(model(tmp_path / "2"), tmp_path / "cache", 0) as again:
        assert again == path and again.resolve() == tmp_path / "2"


def test_link_replaced_by_another_machine_raises(tmp_path: Path) -> None:
    """File locks may not work across machines."""
    with pytest.raises(EngineError, match="another machine"), stable_path(model(tmp_path / "1"), tmp_path, 0) as path:
        path.unlink()
        path.symlink_to(model(tmp_path / "2"))


def test_path_is_the_folder_itself_without_symlinks(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where vLLM's cache should be")
    folder = model(tmp_path / "m")
    with stable_path(folder, tmp_path / "cache", 0) as path:
        assert path == folder


def test_error_inside_the_context_is_not_mistaken_for_a_missing_link(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no memory"), stable_path(model(tmp_path / "m"), tmp_path / "cache", 0):
        raise OSError("no memory")


def test_kernel_cache_folder_is_shared_by_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is set in vLLM's process only; a folder that the trainer's environment names for torch's compiler is
    kept."""
    monkeypatch.setattr(compile_cache, "_USER_TRITON_CACHE", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/torchinductor/triton/0")
    cache = tmp_path / "vllm"
    spec = vllm_start.EngineSpec(Vllm(), torch.bfloat16, 64, None, (1,))
    with vllm_start._environment_of_core(spec, tmp_path / "log", tmp_path, tmp_path / "ready", cache):
        assert os.environ["TRITON_CACHE_DIR"] == str(cache / "posttrain-triton")
        assert os.environ[engine_process.READY] == str(tmp_path / "ready")
        assert os.environ[engine_process.PARENT] == str(os.getpid())
    assert os.environ["TRITON_CACHE_DIR"] == "/tmp/torchinductor/triton/0"
    ours = {engine_process.READY, engine_process.LOG, engine_process.PARENT}
    assert not ours & set(os.environ)
    monkeypatch.setattr(compile_cache, "_USER_TRITON_CACHE", "/of/the/user")
    assert compile_cache.kernel_cache(cache) == {"TRITON_CACHE_DIR": "/of/the/user"}


def test_compiler_settings_are_restored_after_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with inductor.patch(compile_threads=7):  # restored
        with compile_cache.keep_compiler_settings():
            for name in compile_cache.COMPILER_VARIABLES:
                os.environ[name] = "1"
            inductor.compile_threads = 1
        assert inductor.compile_threads == inductor.decide_compile_threads()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"
    assert "TRITON_CACHE_DIR" not in os.environ and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ
