"""Summary of dropped or cut rows by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain import source_locations


def format_causes(causes: Mapping[str, Sequence[str]]) -> str:
    """Format causes with counts and rows: `empty completion: 2 (rows 3, 12); empty prompt: 1 (row 7)`."""
    return "; ".join(
        f"{cause}: {len(uids)} ({source_locations.describe_rows(uids)})" for cause, uids in causes.items() if uids
    )
