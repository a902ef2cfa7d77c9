"""Stable numbers from content: row ids, seeds and orders that are the same on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def number(*parts: str | int, bits: int = 63) -> int:
    """A number of that many bits from the parts; different parts give unrelated numbers (sha256)."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


def row_uid(row: dict[str, Any], source: str, position: int) -> str:
    """16 hex digits from a row's content, its source's name and its position there."""
    text = json.dumps([source, position, row], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
