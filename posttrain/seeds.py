"""Every random draw is a function of (seed, purpose, step): a resumed run needs no generator state, rows no order."""

from __future__ import annotations

import hashlib
import json


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose, the same on every machine: `derive(0, "order", epoch)`.

    A hash of all parts: neighbouring seeds or steps share nothing (`seed + step` would make seed 1 a shifted seed 0).
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
