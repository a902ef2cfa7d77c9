"""Is the model hub there? Asked once, so that a machine without network fails in a sentence instead of retrying."""

from __future__ import annotations

import functools
import os
import socket
from urllib.parse import urlparse

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def host() -> str:
    """The hub's host name (HF_ENDPOINT or huggingface.co)."""
    return urlparse(os.environ.get("HF_ENDPOINT", "")).hostname or "huggingface.co"


@functools.cache
def reachable(timeout: float = 4.0) -> bool:
    """Whether a connection to the hub can be opened, through a proxy taken on trust. False in offline mode."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
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
