"""Recipe keys that had another name in older versions. Old recipes and run directories are read with them."""

from __future__ import annotations

import re

RENAMED = {"bonuses": "advantage_transforms", "spread": "credit_assignment"}  # at the top of a stage: old -> today's
_OLD = re.compile(
    rf"^((?:stages(?:\.[\w-]+|\[\d+\])\.)*(?:defaults\.)?(?:controllers\.)?)({'|'.join(RENAMED)})(?=[.\[]|$)"
)


def current_key(key: str) -> str:
    """A dotted key with today's name: `stages.0.bonuses.1.use` -> `stages.0.advantage_transforms.1.use`."""
    return _OLD.sub(lambda found: f"{found[1]}{RENAMED[found[2]]}", key)
