"""Is the model hub there, and does it know a name? So that what cannot be had is an error before a run, not retried."""

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


QUICK_S = 0.8  # for a question before a run: a hub that is slower is asked again when the run loads


def why_absent(name: str, kind: Literal["model", "dataset"]) -> str:
    """Why a hub id cannot be had, as a clause; "" if it is in the local cache or on the hub, or nobody can say."""
    if is_cached(name, kind):
        return ""
    if said := offline():
        return f"{said} is set, and the local cache does not hold it"
    status = _status(f"https://{host()}/api/{kind}s/{name}")
    if status is None:
        return f"{host()} cannot be reached, and the local cache does not hold it"
    missing = status in (401, 404) and not _token()  # with a token it may be private: the libraries can say
    return f"the hub knows no such {'data set' if kind == 'dataset' else 'model'}" if missing else ""


def is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether a local cache of the hub's libraries holds something of a model or data set."""
    if snapshot(name, kind) is not None:
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets").expanduser()
    named = (name.replace("/", "___"), name.replace("/", "___").lower())
    return kind == "dataset" and any((prepared / one).is_dir() for one in named)


def snapshot(name: str, kind: Literal["model", "dataset"] = "model") -> Path | None:
    """The newest folder of a model or data set in the hub's local cache, or None."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or _home() / "hub"
    place = Path(cache).expanduser() / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _home() -> Path:
    """The folder of the hub's libraries."""
    return Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def _token() -> bool:
    """Whether this user has signed in at the hub."""
    return bool(os.environ.get("HF_TOKEN")) or (_home() / "token").expanduser().is_file()


def _status(url: str) -> int | None:
    """The hub's HTTP status; 0 where it answers late or strangely; None where no connection can be opened."""
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
