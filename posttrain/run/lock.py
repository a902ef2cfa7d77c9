"""Lock of a run directory: one process works in it at a time, and the lock ends with that process, however it ends."""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from pathlib import Path
from typing import IO

from posttrain import terminal
from posttrain.errors import RunError

try:
    import fcntl
except ImportError:  # Windows has no flock: nothing keeps a second process out
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_HOLDER = re.compile(r"process (\d+) on (\S+)")


def take_lock(path: Path) -> IO[str]:
    """Take the exclusive lock of a directory. Raises RunError, with the state of its holder, if another process has
    it."""
    file = (path / LOCK).open("a+", encoding="utf-8")
    if fcntl is None:
        return file
    try:
        _flock(file)
    except BlockingIOError:
        file.close()
        holder, advice = describe_holder(path)
        raise RunError(
            f"another process is working in {path}: {holder}", hint=f"{advice}, or give another --output"
        ) from None
    except OSError as error:  # some network file systems have no locks
        terminal.note(f"{path} cannot be locked ({error}): see that no second process uses it")
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def _flock(file: IO[str]) -> None:
    """Lock a file. Raises BlockingIOError if another process holds the lock for longer than `is_locked` needs to check
    it."""
    for pause in (0.05, 0.1, 0.0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not pause:
                raise
            time.sleep(pause)


def is_locked(path: Path) -> bool:
    """Return whether a process works in this run directory. False if the system or the file system has no locks."""
    if fcntl is None or not (path / LOCK).exists():
        return False
    try:
        with (path / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def describe_holder(path: Path) -> tuple[str, str]:
    """Return (the process that holds a directory's lock, with its state; what to do about it)."""
    text = (path / LOCK).read_text(encoding="utf-8", errors="replace").strip()
    named = _HOLDER.match(text)
    if named is None:
        return "an unknown process", "wait for it, or stop it"
    pid, host = named[1], named[2]
    if host != socket.gethostname():
        return text, f"wait for it, or stop it on {host}"
    state = _process_state(int(pid))
    if state is None:
        lock = shlex.quote(str(path / LOCK))
        return f"{text}, which has ended; a process that it started goes on", f"`fuser {lock}` lists that one: stop it"
    if state in "Tt":
        commands = f"`kill -CONT {pid}` (or `fg` in its shell) continues it, `kill {pid}; kill -CONT {pid}` stops it"
        return f"{text}, which is suspended (Ctrl-Z)", commands
    return f"{text}, which is running", f"wait for it, or stop it with `kill {pid}`"


def _process_state(pid: int) -> str | None:
    """Return the state letter of a process of this machine (T: suspended); None if it has ended, "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None if Path("/proc/self").exists() else ""
    except (OSError, IndexError):
        return ""
