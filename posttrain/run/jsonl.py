"""Files of one JSON object a line that grow while a run goes on, and are cut back to a step when it resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from posttrain.errors import RunError
from posttrain.run.durable import told_when_full, write_text


class StepLog:
    """Appends rows that have a `step`; every row is flushed, so `tail -f` and a kill -9 see whole steps.

    On opening, rows after `resume_after` (all rows where it is None) and a torn last line leave the file; whole rows
    that leave are kept in `attic`, so nothing that was measured is lost.
    """

    def __init__(self, path: Path, resume_after: int | None, attic: Path) -> None:
        self.path = path
        if path.exists():
            self._cut(resume_after, attic)
        self._file: TextIO = path.open("a", encoding="utf-8")

    @classmethod
    def muted(cls) -> Self:
        """A log that keeps nothing: of several processes of a run, one writes."""
        log = cls.__new__(cls)
        log.path = Path(os.devnull)
        log._file = log.path.open("a", encoding="utf-8")
        return log

    def _cut(self, resume_after: int | None, attic: Path) -> None:
        rows = read_rows(self.path)
        kept = [row for row in rows if resume_after is not None and row["step"] <= resume_after]
        left = [row for row in rows if resume_after is None or row["step"] > resume_after]
        if left:
            attic.mkdir(parents=True, exist_ok=True)
            write_text(attic / f"{self.path.stem}-after-resume-point.jsonl", to_lines(left))
        write_text(self.path, to_lines(kept))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows behind the others and flush them."""
        with told_when_full(self.path):
            self._file.write(to_lines(rows))
            self._file.flush()

    def close(self) -> None:
        """Also behind a row that had no room: the file still holds it, and tries again."""
        with told_when_full(self.path):
            self._file.close()


def to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON lines. NaN and infinity are no JSON: they become null."""
    return "".join(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file. A torn last line (a kill within a write) is left out; any other broken line is a RunError."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # what follows the last newline: empty, or a write that was cut short
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines) and not torn:
                break  # a filesystem may bring the newline to disk before the rest of the line
            raise RunError(f"broken line: {error}", where=f"{path}:{number}") from error
    return rows
