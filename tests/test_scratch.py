"""Temporary folders: removed at the end, and after a kill at the next start; folders of living processes stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain.scratch import Scratch, remove_leftovers, scratch

HOLD = "from posttrain.scratch import Scratch; print(Scratch('engine').path, flush=True); input()"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    remove_leftovers.cache_clear()
    yield tmp_path
    remove_leftovers.cache_clear()


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process with its own folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folder_is_removed_at_the_end(temporary: Path) -> None:
    with scratch("engine") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == temporary and folder.name.startswith(f"posttrain-{os.getuid()}-engine-")
    assert list(temporary.iterdir()) == []
    again = Scratch("engine")
    again.close()
    again.close()


def test_only_folders_of_killed_processes_are_removed(temporary: Path) -> None:
    dead, left = holder()
    living, kept = holder()
    try:
        (left / "weights").write_text("x")
        dead.kill()
        dead.wait()
        others = [temporary / "posttrain-engine-old", temporary / f"posttrain-{os.getuid()}-judge"]
        for folder in others:
            folder.mkdir()
        (temporary / f"posttrain-{os.getuid()}-engine-link").symlink_to(others[0])
        assert left.is_dir()
        with scratch("engine") as mine:
            assert not left.exists()
            assert all(folder.is_dir() for folder in (kept, mine, *others))
    finally:
        living.communicate("\n")


def test_folder_can_be_closed_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process closes it when its stdin ends and when its run's connection ends, often simultaneously."""
    folder, close, closed = Scratch("engine"), os.close, list[int]()

    def slow(descriptor: int) -> None:
        closed.append(descriptor)
        time.sleep(0.2)
        close(descriptor)

    folder.path.rmdir()  # so that only the lock's descriptor is closed
    monkeypatch.setattr(os, "close", slow)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(folder.close) for _ in range(2)]:
            done.result()
    assert len(closed) == 1
