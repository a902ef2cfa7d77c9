"""Summary of dropped or cut rows by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain import source_locations


def format_causes(causes: Mapping[str, Sequence[str]]) -> str:
    """Format causes with counts and rows: `chosen and rejected are the same: 2 (rows 7, 12); empty completion: 1
    (row 3)`.
    """
    return "; ".join(f"{cause}: {len(uids)} ({source_locations.rows(uids)})" for cause, uids in causes.items() if uids)
