"""Temporary folders that are removed with their process; folders of killed processes are removed at the next start.

A folder's name contains the user and purpose, and the folder is locked while its process lives, however that process
ends. So an unlocked folder belongs to a dead process. On systems without such locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Scratch:
    """A temporary folder at `path`, removed by `close`. purpose: one word, part of the folder's name."""

    def __init__(self, purpose: str) -> None:
        remove_leftovers(purpose)
        new = Path(tempfile.mkdtemp(prefix="posttrain-new-"))
        self._lock = _lock(new)
        self._closing = threading.Lock()
        # Rename only after locking, so that a folder with the name that other processes look for is always locked.
        self.path = new.rename(new.with_name(_prefix(purpose) + new.name.removeprefix("posttrain-new-")))

    def close(self) -> None:
        """Remove the folder. Safe to call twice, even from two threads concurrently."""
        shutil.rmtree(self.path, ignore_errors=True)
        with self._closing:
            lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """Provide the path of a `Scratch` folder, removed at the end of the `with` block."""
    with Scratch(purpose) as folder:
        yield folder.path


@functools.cache
def remove_leftovers(purpose: str) -> None:
    """Remove this user's folders for `purpose` whose processes are dead; searches once per process."""
    if fcntl is None:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(purpose)}*"):
        with contextlib.suppress(OSError):  # already removed, not a folder, or owned by another user
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process is alive
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _prefix(purpose: str) -> str:
    return f"posttrain-{os.getuid() if hasattr(os, 'getuid') else ''}-{purpose}-"


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; the kernel releases it when the process ends."""
    if fcntl is None:
        return None
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock
