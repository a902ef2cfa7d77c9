"""What was left out and why, told by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain import source_locations


def format_causes(causes: Mapping[str, Sequence[str]]) -> str:
    """`chosen and rejected are the same: 2 (rows 7, 12); empty completion: 1 (row 3)`."""
    return "; ".join(f"{cause}: {len(uids)} ({source_locations.rows(uids)})" for cause, uids in causes.items() if uids)
