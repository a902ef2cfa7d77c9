"""Random seeds derived from (seed, purpose, step): resuming needs no generator state, and row order does not matter."""

from __future__ import annotations

import hashlib
import json


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for one purpose, the same on every machine: `derive(0, "order", epoch)`.

    A hash of all parts: neighboring seeds or steps are unrelated (`seed + step` would make seed 1 a shifted seed 0).
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
