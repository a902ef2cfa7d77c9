"""Where rows were read, by uid, so that an error names a file and a line beside the hash.

A table beside the rows and not a column of theirs: a column would be seen by templates and rewards, and be written into
results that are otherwise the same on every machine. A uid is made from a row's content and place, so an entry never
changes its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

SHOWN = 3  # of several rows
_places: dict[str, str] = {}


def note(uid: str, place: str) -> None:
    """Remember where the row of that uid was read: `FILE:LINE`, or a source and a number."""
    _places[uid] = place


def place_of(uid: object) -> str:
    """`rows.jsonl:3`, relative to the working directory if it lies below; empty for a row that was made in code.

    What is made from a row (`UID/chosen`, `UID@0.6`, `UID.2`) is where that row is.
    """
    found = _places.get(str(uid)) or _places.get(re.split(r"[/@]|\.\d+$", str(uid))[0], "")
    return found.removeprefix(f"{Path.cwd()}/")


def row(uid: object) -> str:
    """`rows.jsonl:3 (row 5f2c)`, or `row 5f2c` where it is not known where that is."""
    place = place_of(uid)
    return f"{place} (row {uid})" if place else f"row {uid}"


def rows(uids: Sequence[str]) -> str:
    """`rows.jsonl:3, 7, ...`; where that is not known `row 3`, or `rows 7, 12`."""
    once = list(dict.fromkeys(uids))
    places = [place_of(uid) for uid in once[:SHOWN]]
    more = ", ..." if len(once) > SHOWN else ""
    if all(places):
        return ", ".join(_without_repeats(places)) + more
    return f"{'row' if len(once) == 1 else 'rows'} {', '.join(map(str, once[:SHOWN]))}{more}"


def _without_repeats(places: Sequence[str]) -> list[str]:
    """The places, the file only where it is another than before."""
    heads = [re.sub(r"\d+$", "", place) for place in places]
    before = ["", *heads[:-1]]
    return [p.removeprefix(h) if h == b else p for p, h, b in zip(places, heads, before, strict=True)]
