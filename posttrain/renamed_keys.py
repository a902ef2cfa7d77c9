"""Renamed recipe keys: old recipes and run directories are read with today's names."""

from __future__ import annotations

import re

# Top-level keys of a stage: old name -> current name
RENAMED = {"bonuses": "advantage_transforms", "spread": "credit_assignment"}
_OLD = re.compile(
    rf"^((?:stages(?:\.[\w-]+|\[\d+\])\.)*(?:defaults\.)?(?:controllers\.)?)({'|'.join(RENAMED)})(?=[.\[]|$)"
)


def current_key(key: str) -> str:
    """Return a dotted key with its current name: `stages.0.bonuses.1.use` -> `stages.0.advantage_transforms.1.use`."""
    return _OLD.sub(lambda match: f"{match[1]}{RENAMED[match[2]]}", key)
