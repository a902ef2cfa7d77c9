"""Atomic replacement of folders: at every moment the old or the new folder exists."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.run import atomic_io
from posttrain.run.atomic_io import put_in_place


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "weights").write_text(text)
    return path


class Killed(BaseException):
    """Stands for the sudden end of a process."""


def test_folder_replaces_another(tmp_path: Path) -> None:
    folder(tmp_path / "final", "old")
    put_in_place(folder(tmp_path / "final.tmp", "new"), tmp_path / "final")
    assert (tmp_path / "final" / "weights").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


def test_folder_is_moved_to_a_free_path(tmp_path: Path) -> None:
    put_in_place(folder(tmp_path / "final.tmp", "new"), tmp_path / "final")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("moment", range(8))
def test_kill_at_any_moment_leaves_the_old_or_the_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The process ends before its n-th file-system call."""
    folder(tmp_path / "final", "old")
    new = folder(tmp_path / "final.tmp", "new")
    left = [moment]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        patch.setattr(atomic_io, "_exchange_names", counted(atomic_io._exchange_names))
        patch.setattr(atomic_io, "sync_folder", counted(atomic_io.sync_folder))
        with contextlib.suppress(Killed):
            put_in_place(new, tmp_path / "final")
    assert (tmp_path / "final" / "weights").read_text() in ("old", "new")


def test_without_renameat2_the_old_folder_is_restored_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process is killed between the two renames, the next one before its first."""
    monkeypatch.setattr(atomic_io, "_exchange_names", lambda *_: False)
    folder(tmp_path / "final", "old")
    rename = Path.rename

    def killed(self: Path, target: Any) -> Path:
        if os.fspath(target).endswith("final"):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", killed)
        put_in_place(folder(tmp_path / "final.tmp", "new"), tmp_path / "final")
    assert (tmp_path / "final.old" / "weights").read_text() == "old"
    put_in_place(tmp_path / "final.tmp", tmp_path / "final")
    assert (tmp_path / "final" / "weights").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
