"""Temporary folders that end with their process: what one that was killed has left, the next that starts removes.

A folder's name says whose it is and what for, and it is locked for as long as its process lives, however that ends. So
a folder of ours without a lock is of a dead process. Where there are no such locks nothing is removed.
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
    """A new folder at `path`, until `close`. purpose: one word, a part of its name."""

    def __init__(self, purpose: str) -> None:
        remove_left(purpose)
        new = Path(tempfile.mkdtemp(prefix="posttrain-new-"))
        self._lock = _lock(new)
        self._closing = threading.Lock()
        # Only now by the name that others look for: a folder of that name is locked from its first moment.
        self.path = new.rename(new.with_name(_prefix(purpose) + new.name.removeprefix("posttrain-new-")))

    def close(self) -> None:
        """Remove the folder. Calling it twice is fine, also from two threads at once."""
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
    """The path of a `Scratch` that is removed at the end of `with`."""
    with Scratch(purpose) as folder:
        yield folder.path


@functools.cache
def remove_left(purpose: str) -> None:
    """Remove this user's folders for `purpose` whose processes are dead. Looked for once a process."""
    if fcntl is None:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(purpose)}*"):
        with contextlib.suppress(OSError):  # it has gone, is no folder, or another user's
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _prefix(purpose: str) -> str:
    return f"posttrain-{os.getuid() if hasattr(os, 'getuid') else ''}-{purpose}-"


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; the kernel lets go of it when the process has ended."""
    if fcntl is None:
        return None
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock
