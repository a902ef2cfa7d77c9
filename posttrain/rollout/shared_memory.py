"""Weights for servers on the same machine: one copy into memory that they map, instead of a stream over HTTP. Adapters
are files, which they copy from where they lie.

The memory has no name in a file system: another process opens it as a file of ours under /proc. So it needs no room in
/dev/shm, and it is gone when we and all that mapped it are, also after SIGKILL. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from posttrain.rollout import wire
from posttrain.rollout.client import Client

PLACE = re.compile(r"/proc/(\d+)/fd/\d+")


class Memory:
    """The bytes of a message, for others to map. They keep what they have mapped after this is closed."""

    def __init__(self, parts: wire.Body) -> None:
        self._fd = os.memfd_create("posttrain")
        self.place = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.writelines(parts)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def lent(path: Path) -> Iterator[str]:
    """The place of an open file, for `copied`. The other process need not see the folder that the file is in."""
    with path.open("rb") as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def known(place: str) -> Path:
    """That place, to be opened. Raises ValueError if it is none; opening raises OSError for what belongs to another
    machine, container or user."""
    if not PLACE.fullmatch(place):
        raise ValueError(f"no place of shared memory: {place}")
    return Path(place)


def process_of(place: str) -> str:
    """The process id in that place."""
    found = PLACE.fullmatch(place)
    return found[1] if found else ""


def copied(place: str, to: Path) -> None:
    """Copy the file that is `lent` there, inside the kernel."""
    shutil.copyfile(known(place), to)


def mapped(place: str) -> mmap.mmap:
    """What a `Memory` of that place holds, without a copy."""
    with known(place).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants; nobody writes


def reaches(client: Client) -> bool:
    """Whether that server can map our memory: it is asked to read the session's name there, which proves to it that
    the memory is ours. It then maps what this process has, and nobody else's."""
    try:
        memory = Memory([client.name.encode()])
    except (AttributeError, OSError):  # not Linux, or a container that forbids it
        return False
    with memory:
        asked = [json.dumps({"place": memory.place}).encode()]
        return bool(client.ask("POST", "/shared", asked)["found"] == client.name)


def found(place: str) -> str:
    """The server's answer: the secret there, or nothing. Another process may have a file of that number here."""
    try:
        with mapped(place) as memory:
            return memory[:64].decode("ascii", "replace")
    except (OSError, ValueError):
        return ""
