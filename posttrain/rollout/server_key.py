"""API key that a run sends to a vLLM server, which refuses requests without it.

A run makes a key for each server that it starts. `posttrain serve` takes the key from TOKEN_VARIABLE, or makes one and
writes it to a file that only this user can read; runs on the same machine read that file, and runs elsewhere need the
variable.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.errors import UserError

TOKEN_VARIABLE = "POSTTRAIN_SERVER_TOKEN"
_HERE = ("127.0.0.1", "localhost", "::1")


def key_file(port: int) -> Path:
    """Return the file to which `posttrain serve` on this port writes its key."""
    return Path.home() / ".cache" / "posttrain" / f"server-{port}.token"


def serving_key(port: int) -> tuple[str, Path | None]:
    """Return (key of a server to be started, the file that it was written to). The file is None if the key came from
    the environment."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given, None
    token, place = secrets.token_urlsafe(32), key_file(port)
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.unlink(missing_ok=True)
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(token)
    except OSError as error:
        raise UserError(
            f"the server's token cannot be written to {place}: {error.strerror}", hint=f"set {TOKEN_VARIABLE} instead"
        ) from error
    return token, place


def client_key(url: str) -> str:
    """Return the key for a server; "" if none is known here."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    place = urlsplit(url)
    try:
        return key_file(place.port or 80).read_text(encoding="ascii") if place.hostname in _HERE else ""
    except OSError:
        return ""
