"""What was left out and why, told by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = 3  # rows that are named for each cause


def told(causes: Mapping[str, Sequence[str]]) -> str:
    """`chosen and rejected are the same: 2 (rows 7, 12); empty completion: 1 (row 3)`."""
    return "; ".join(f"{cause}: {len(uids)} ({named(uids)})" for cause, uids in causes.items() if uids)


def named(uids: Sequence[str]) -> str:
    """`row 3`, `rows 7, 12`, `rows 1, 2, 5, ...`."""
    once = list(dict.fromkeys(uids))
    shown = ", ".join(str(uid) for uid in once[:SHOWN])
    return f"{'row' if len(once) == 1 else 'rows'} {shown}{', ...' if len(once) > SHOWN else ''}"
