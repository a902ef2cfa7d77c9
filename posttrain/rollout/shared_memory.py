"""Weights for servers on the same machine: one copy into memory that they map, instead of a stream over HTTP.

The memory has no name in a file system: another process opens it as a file of ours under /proc. So it needs no room in
/dev/shm, and it is gone when we and all that mapped it are, also after SIGKILL. Linux only.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import Self

from posttrain.rollout import wire
from posttrain.rollout.client import Client

PLACE = re.compile(r"/proc/\d+/fd/\d+")


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


def mapped(place: str) -> mmap.mmap:
    """What a `Memory` of that place holds, without a copy. Raises ValueError for another place, OSError if it cannot
    be opened: it belongs to another machine, container or user."""
    if not PLACE.fullmatch(place):
        raise ValueError(f"no place of shared memory: {place}")
    with Path(place).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants; nobody writes


def reaches(client: Client) -> bool:
    """Whether that server can map our memory: it is asked to read a secret there."""
    if not hasattr(os, "memfd_create"):
        return False
    secret = secrets.token_hex(16)
    with Memory([secret.encode()]) as memory:
        asked = [json.dumps({"place": memory.place}).encode()]
        return bool(client.ask("POST", "/shared", asked)["found"] == secret)


def found(place: str) -> str:
    """The server's answer: the secret there, or nothing. Another process may have a file of that number here."""
    try:
        with mapped(place) as memory:
            return memory[:64].decode("ascii", "replace")
    except (OSError, ValueError):
        return ""
