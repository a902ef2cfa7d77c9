"""Source locations of rows by uid, so that errors name a file and a line besides the hash.

Stored in a separate table because a column would be visible to templates and rewards, and would be written into results
that are otherwise the same on every machine. A uid is made from a row's content and location, so an entry never changes
its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MAX_LISTED = 3  # rows listed in a message
_locations: dict[str, str] = {}


def record_location(uid: str, place: str) -> None:
    """Record the source location of a row: `FILE:LINE`, or a source and a number."""
    _locations[uid] = place


def find_location(uid: object) -> str:
    """Return the location of a row, relative to the working directory if inside it; "" for a row created in code.

    A derived row (`UID/chosen`, `UID@0.6`, `UID.2`) has the location of its source row.
    """
    found = _locations.get(str(uid)) or _locations.get(re.split(r"[/@]|\.\d+$", str(uid))[0], "")
    return found.removeprefix(f"{Path.cwd()}/")


def describe_row(uid: object) -> str:
    """Return `rows.jsonl:3 (row 5f2c)`, or `row 5f2c` if the location is unknown."""
    place = find_location(uid)
    return f"{place} (row {uid})" if place else f"row {uid}"


def describe_rows(uids: Sequence[str]) -> str:
    """Return `rows.jsonl:3, 7, ...`; `row 3` or `rows 7, 12` if a location is unknown."""
    once = list(dict.fromkeys(uids))
    places = [find_location(uid) for uid in once[:MAX_LISTED]]
    more = ", ..." if len(once) > MAX_LISTED else ""
    if all(places):
        return ", ".join(_without_repeats(places)) + more
    return f"{'row' if len(once) == 1 else 'rows'} {', '.join(map(str, once[:MAX_LISTED]))}{more}"


def _without_repeats(places: Sequence[str]) -> list[str]:
    """Return the locations, omitting the file name if it equals that of the previous location."""
    heads = [re.sub(r"\d+$", "", place) for place in places]
    before = ["", *heads[:-1]]
    return [p.removeprefix(h) if h == b else p for p, h, b in zip(places, heads, before, strict=True)]
