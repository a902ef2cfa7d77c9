"""Row ids from content: the same on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def row_uid(row: dict[str, Any], source: str, position: int) -> str:
    """16 hex digits from a row's content, its source's name and its position there."""
    text = json.dumps([source, position, row], sort_keys=True, ensure_ascii=True, default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_text(value: Any) -> str:
    """A value that JSON has no form for; of a Pillow image its pixels, since its text says where it is in memory."""
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "getbbox") else str(value)
