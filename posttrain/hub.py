"""Availability of the model hub and of its names, so that a missing model is an error before a run and not retried."""

from __future__ import annotations

import functools
import os
import socket
import ssl
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def host() -> str:
    """Return the hub's host name (HF_ENDPOINT or huggingface.co)."""
    return urlparse(os.environ.get("HF_ENDPOINT", "")).hostname or "huggingface.co"


def offline_setting() -> str:
    """Return the setting that forbids access to the hub (`HF_HUB_OFFLINE=1`); "" if there is none."""
    name = next((name for name in _OFFLINE if os.environ.get(name)), "")  # the first variable that is set wins
    value = os.environ.get(name, "")
    return f"{name}={value}" if value.lower() in ("1", "true", "yes", "on") else ""


def explain_unavailable() -> str:
    """Return why the hub cannot be used, as a clause; "" if it can be reached."""
    if setting := offline_setting():
        return f"{setting} is set, so the hub is not used"
    return "" if is_reachable() else f"{host()} cannot be reached from here"


def offline_hint() -> str:
    """Return a hint if the hub is disabled by a variable; else ""."""
    return (
        f"name a local path, or unset {setting.partition('=')[0]} to ask the hub"
        if (setting := offline_setting())
        else ""
    )


@functools.cache
def is_reachable(timeout: float = 4.0) -> bool:
    """Return whether the hub accepts connections; proxies are assumed to work. False in offline mode."""
    if offline_setting():
        return False
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        with socket.create_connection((host(), 443), timeout=timeout):
            return True
    except OSError:
        return False


def looks_like_id(name: str) -> bool:
    """Return whether a name has the form `owner/name` or `name`, with the characters that the hub allows."""
    parts = name.split("/")
    return len(parts) in (1, 2) and all(
        p and p[0].isalnum() and all(c.isalnum() or c in "._-" for c in p) for p in parts
    )


def is_only_path(name: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether a name cannot be a hub id: it has a file suffix, a path prefix, or a forbidden character."""
    return name.endswith(suffixes) or name.startswith((".", "/", "~")) or not looks_like_id(name)


QUICK_S = 0.8  # timeout of the check before a run; a slower hub is asked again when the run loads


def explain_missing(name: str, kind: Literal["model", "dataset"]) -> str:
    """Return why a hub id is unavailable, as a clause; "" if it is in the local cache or on the hub, or unknown."""
    if is_cached(name, kind):
        return ""
    if setting := offline_setting():
        return f"{setting} is set, and the local cache does not have it"
    status = _request_status(f"https://{host()}/api/{kind}s/{name}")
    if status is None:
        return f"{host()} cannot be reached, and the local cache does not have it"
    missing = status in (401, 404) and not _is_signed_in()  # with a token it may be private: the libraries can say
    return f"the hub has no such {'data set' if kind == 'dataset' else 'model'}" if missing else ""


def is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Return whether a local cache of the hub's libraries has files of a model or data set."""
    if find_snapshot(name, kind) is not None:
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets").expanduser()
    named = (name.replace("/", "___"), name.replace("/", "___").lower())
    return kind == "dataset" and any((prepared / folder).is_dir() for folder in named)


def find_snapshot(name: str, kind: Literal["model", "dataset"] = "model") -> Path | None:
    """Return the newest snapshot folder of a model or data set in the hub's local cache, or None."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or _home() / "hub"
    place = Path(cache).expanduser() / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _home() -> Path:
    """Return the cache folder of the hub's libraries."""
    return Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def _is_signed_in() -> bool:
    """Return whether the user is signed in at the hub."""
    return bool(os.environ.get("HF_TOKEN")) or (_home() / "token").expanduser().is_file()


def _request_status(url: str) -> int | None:
    """Return the hub's HTTP status; 0 for a timeout or an invalid answer; None if no connection can be opened."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=QUICK_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except URLError as error:
        return 0 if isinstance(error.reason, TimeoutError | ssl.SSLError) else None
    except (OSError, ValueError):
        return 0
