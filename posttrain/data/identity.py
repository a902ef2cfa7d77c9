"""Row ids from content: the same on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def row_uid(row: dict[str, Any], source: str, position: int) -> str:
    """16 hex digits from a row's content, its source's name and its position there."""
    text = json.dumps([source, position, row], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
