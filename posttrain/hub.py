"""Is the model hub there? Asked once, so that a machine without network fails in a sentence instead of retrying."""

from __future__ import annotations

import functools
import os
import socket
from urllib.parse import urlparse

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def host() -> str:
    """The hub's host name (HF_ENDPOINT or huggingface.co)."""
    return urlparse(os.environ.get("HF_ENDPOINT", "")).hostname or "huggingface.co"


def offline() -> str:
    """The variable that forbids asking the hub, as it is set (`HF_HUB_OFFLINE=1`); empty where none does."""
    name = next((name for name in _OFFLINE if os.environ.get(name)), "")  # the first that is set decides
    value = os.environ.get(name, "")
    return f"{name}={value}" if value.lower() in ("1", "true", "yes", "on") else ""


def why_silent() -> str:
    """Why the hub does not answer, as a clause; empty where it can be reached."""
    if said := offline():
        return f"{said} is set, so the hub is not asked"
    return "" if reachable() else f"{host()} cannot be reached from here"


def way_out() -> str:
    """What to do where the hub is silent because somebody asked for it; else empty."""
    return f"name a local path, or unset {said.partition('=')[0]} to ask the hub" if (said := offline()) else ""


@functools.cache
def reachable(timeout: float = 4.0) -> bool:
    """Whether a connection to the hub can be opened, through a proxy taken on trust. False in offline mode."""
    if offline():
        return False
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        with socket.create_connection((host(), 443), timeout=timeout):
            return True
    except OSError:
        return False


def looks_like_id(name: str) -> bool:
    """`owner/name` or `name`, in the letters that the hub allows."""
    parts = name.split("/")
    return len(parts) in (1, 2) and all(
        p and p[0].isalnum() and all(c.isalnum() or c in "._-" for c in p) for p in parts
    )


def only_a_path(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a name can be no hub id: it ends like a file, begins like a path, or has letters that no id has."""
    return name.endswith(suffixes) or name.startswith((".", "/", "~")) or not looks_like_id(name)
