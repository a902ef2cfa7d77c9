"""Redaction of passwords and API keys in recipes: found by key name, replaced before anything is shown or saved.

A secret belongs in an environment variable. If a recipe contains one, `***` replaces it in the run directory, on pages,
in messages and in trackers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET = re.compile(
    r"(?i)(?:api|auth|access|secret|private|wandb)[_.-]?k(?:ey|ee)$|(?:^|[._-])authorization$"
    r"|(?:hub|hf|auth|access|api|bearer)[_-]?token$|(?:^|\.)token$|(?:password|passwd|secret)$"
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)")  # NAME:PASSWORD in a URL
_ENTRY = re.compile(
    r"""(?P<key>[\w.-]+)(?P<sign>["']?\s*[:=]\s*)(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s,}\]"'\[{][^\s,}\]]*)"""
)


def is_secret(name: str) -> bool:
    """Return whether a key's name, such as `api_key` or `hub_token`, marks its value as secret."""
    return bool(_SECRET.search(name))


def is_variable(name: str) -> bool:
    """Return whether a text has the usual form of an environment variable's name, and is not a secret in its place."""
    return bool(_VARIABLE.fullmatch(name))


def without_secrets(value: Any, key: str = "") -> Any:
    """Return `value` with `***` for every secret at any depth, found by its key."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, key) for inner in value]
    if is_secret(key) and value and not isinstance(value, bool):
        return HIDDEN
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if key.endswith("key_env") and not is_variable(value) else _LOGIN.sub(HIDDEN, value)


def redacted_text(text: str) -> str:
    """Return a recipe's text with `***` for secrets; everything else, including comments, is unchanged."""

    def hide_value(match: re.Match[str]) -> str:
        key, value = match["key"], match["value"].strip("\"'")
        return f"{key}{match['sign']}{HIDDEN!r}" if without_secrets(value, key) == HIDDEN else match[0]

    return _LOGIN.sub(HIDDEN, _ENTRY.sub(hide_value, text))
