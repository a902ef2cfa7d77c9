"""Writes that survive a kill and a power cut: the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError, RunError

FULL = 1 << 16  # bytes: a disk with less has no room for any file of a run


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step: a temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with told_when_full(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, replaced in one step."""
    write_text(path, to_text(value))


def to_text(value: Any) -> str:
    """JSON for people: indented, a newline at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """The value of a JSON file, or None where there is no file. Raises RunError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"not readable as JSON: {error}", where=str(path)) from error


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def syncing() -> Iterator[Callable[[Path], None]]:
    """A function that starts to bring a file to the disk and returns; at the end of the block all are there.

    Raises the OSError of a file that could not be brought there.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sync") as thread:
        started = []
        yield lambda path: started.append(thread.submit(sync_file, path))
        for file in started:
            file.result()


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def told_when_full(path: Path) -> Iterator[None]:
    """A full disk becomes a RunError that says where and how to go on."""
    try:
        yield
    except Exception as error:
        if not _is_full(error, path):
            raise
        raise RunError(
            "no space left on the disk; the last complete checkpoint is kept",
            where=str(path),
            hint="free some space, then run the same command with --resume",
        ) from error


def _is_full(error: Exception, path: Path) -> bool:
    """Whether no space is why `path` could not be written. safetensors and torch have errors of their own for it, and
    torch's do not say why: then the disk is asked."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, PosttrainError):
        return False
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return "No space left" in str(error) or shutil.disk_usage(existing).free < FULL
