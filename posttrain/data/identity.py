"""Row ids computed from row contents, identical on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def row_uid(row: dict[str, Any], source: str, position: int) -> str:
    """Return 16 hex digits hashed from a row's content, its source's name and its position in the source."""
    text = json.dumps([source, position, row], sort_keys=True, ensure_ascii=True, default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_text(value: Any) -> str:
    """Return a text for a value without a JSON form: a hash of the pixels for a Pillow image, else str()."""
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "getbbox") else str(value)
