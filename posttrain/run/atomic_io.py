"""Atomic file writes: after a kill or a power cut there is the old file or the new one, never a part of one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError, RunError

FULL = 1 << 16  # bytes; a disk with less free space counts as full


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically: temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = _temporary(path)
    with explain_write_errors(path):
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
    """Replace `path` atomically by `value` as indented JSON."""
    write_text(path, to_text(value))


def to_text(value: Any) -> str:
    """Return readable JSON: indented, with a newline at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """Return the value of a JSON file, or None if there is no file. Raises RunError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"not readable as JSON: {error}", where=str(path)) from error


def sync_file(path: Path) -> None:
    """Flush a file's content to disk (fsync)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def sync_files() -> Iterator[Callable[[Path], None]]:
    """Yield a function that starts to fsync a file in the background; at the end of the block all files are on disk.

    Raises the OSError of a file that could not be flushed.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sync") as thread:
        started = []
        yield lambda path: started.append(thread.submit(sync_file, path))
        for file in started:
            file.result()


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(finished: Path, folder: Path) -> None:
    """Rename a finished folder to `folder`, and remove an older folder of that name afterwards.

    The two names are exchanged atomically, so a crash at any moment leaves the old folder or the new one. If the file
    system cannot do that, the old folder is called NAME.old for an instant, and is restored at the next call.
    """
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    if not folder.exists():
        finished.rename(folder)
    elif _exchange_names(finished, folder):
        sync_folder(folder.parent)
        finished.rename(_remove_folder(old))
    else:
        folder.rename(_remove_folder(old))
        finished.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_folder(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return place


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names atomically (Linux's renameat2). Returns False, with nothing changed, if that is not
    supported."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # another operating system or C library
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0)


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of writing a file inside the block into a RunError that says where, why and how to continue."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PosttrainError):
            raise
        if _is_full(error, path):
            raise RunError(
                "no space left on the disk; complete checkpoints are kept",
                where=str(path),
                hint="free some space, then run the same command with --resume",
            ) from error
        explained = system_error(error, path)
        if explained is None:
            raise
        raise explained from error


def system_error(error: BaseException, path: Path | None = None) -> RunError | None:
    """Return a RunError for an error of the operating system, with the file's name; None for any other error.

    path: the file to be written. Without it, errors about names (no such file) return None, because they may have other
    causes. safetensors raises an error of its own, with the error number in its text.
    """
    number = _errno(error)
    if number not in _HINTS or (path is None and number in _NAME_ERRORS):
        return None
    name = error.filename if isinstance(error, OSError) and error.filename is not None else path
    if path is not None and name is not None and _is_temporary_of(str(name), path):
        name = path.parent if number in (errno.EACCES, errno.EROFS, errno.EPERM) else path
    return RunError(os.strerror(number), where="" if name is None else str(name), hint=_HINTS[number])


def _temporary(path: Path) -> Path:
    """Return the temporary file beside `path` that is renamed to it once it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _is_temporary_of(name: str, path: Path) -> bool:
    """Return whether a file name is that of `_temporary`, which means nothing to users."""
    return Path(name).name == _temporary(path).name


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(found[1]) if found else None


_NAME_ERRORS = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EBUSY, errno.ETXTBSY}
_RESUME_HINT = "fix that, then run the same command with --resume"
_OUTPUT_HINT = "make it writable, or name another --output"
_HINTS = {
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _OUTPUT_HINT),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY), "something else has this name"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "name another --output"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files: `ulimit -n 4096`"),
    errno.EFBIG: "allow larger files: `ulimit -f unlimited`, or a file system that takes them",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, then run the same command with --resume"),
    **dict.fromkeys((errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EBUSY, errno.ETXTBSY), _RESUME_HINT),
    errno.ENOENT: f"its folder is gone, or a link leads nowhere; {_RESUME_HINT}",
}


def _is_full(error: Exception, path: Path) -> bool:
    """Return whether writing `path` failed because the disk is full. safetensors and torch raise their own errors for
    that; torch's do not give the reason, so the free space is checked."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return "No space left" in str(error) or shutil.disk_usage(existing).free < FULL
