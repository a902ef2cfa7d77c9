"""What was left out and why, told by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain import whereabouts


def told(causes: Mapping[str, Sequence[str]]) -> str:
    """`chosen and rejected are the same: 2 (rows 7, 12); empty completion: 1 (row 3)`."""
    return "; ".join(f"{cause}: {len(uids)} ({whereabouts.rows(uids)})" for cause, uids in causes.items() if uids)
