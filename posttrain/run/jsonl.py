"""Files with one JSON object per line that grow during a run and are truncated to a step when it resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from posttrain import terminal
from posttrain.errors import RunError, count_noun
from posttrain.run.atomic_io import explain_write_errors, write_text

SHOWN = 60  # characters of a broken line shown in errors


class StepLog:
    """Appends rows that have a `step`. Every row is flushed, so `tail -f` shows whole steps, and so does the file after
    kill -9.

    On opening, these leave the file: rows after `resume_after` (all rows if it is None), broken lines and a torn last
    line. All except the torn line are kept in `attic`, so no measurement is lost.

    rows: number of rows in the file. last: step of the newest row. on_rows: functions that get the rows of each
    `append`.
    """

    def __init__(
        self,
        path: Path,
        resume_after: int | None,
        attic: Path,
        on_rows: Sequence[Callable[[Sequence[Mapping[str, Any]]], None]] = (),
    ) -> None:
        self.path, self.on_rows = path, on_rows
        self.rows, self.last = 0, -1
        if path.exists():
            self._cut(resume_after, attic)
        self._file: TextIO = path.open("a", encoding="utf-8")

    @classmethod
    def without_file(cls) -> Self:
        """Return a log that writes nothing: only one of a run's processes writes."""
        log = cls.__new__(cls)
        log.path, log.on_rows = Path(os.devnull), ()
        log.rows, log.last = 0, -1
        log._file = log.path.open("a", encoding="utf-8")
        return log

    def _cut(self, resume_after: int | None, attic: Path) -> None:
        rows, broken = sound_rows(self.path, stepped=True)
        kept = [row for row in rows if resume_after is not None and row["step"] <= resume_after]
        left = [row for row in rows if resume_after is None or row["step"] > resume_after]
        attic.mkdir(parents=True, exist_ok=True)
        if left:
            write_text(attic / f"{self.path.stem}-after-resume-point.jsonl", to_lines(left))
        if broken:
            place = attic / f"{self.path.stem}-broken-lines.txt"
            write_text(place, "".join(f"line {number}: {line}\n" for number, line in broken.items()))
            lines = count_noun(len(broken), "broken line")
            terminal.note(f"{self.path}:{next(iter(broken))}  {lines} left out, kept in {place}")
        write_text(self.path, to_lines(kept))
        self._count(kept)

    def _count(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += len(rows)
        self.last = max([self.last, *(row["step"] for row in rows)])

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows at the end of the file and flush them."""
        written = list(rows)
        with explain_write_errors(self.path):
            self._file.write(to_lines(written))
            self._file.flush()
        self._count(written)
        for on_rows in self.on_rows:
            on_rows(written)

    def sync(self) -> None:
        """Flush all rows to disk (fsync): a checkpoint must not survive the rows of the steps before it."""
        with explain_write_errors(self.path):
            self._file.flush()
            if self.path.is_file():  # the null device of a log without file cannot be synced
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises RunError if rows for which the disk had no space still cannot be written."""
        with explain_write_errors(self.path):
            self._file.close()


def lost_rows(log: StepLog, expected: int | None, *, but: int | None = None) -> str | None:
    """Return a warning on resume if the file has fewer rows than a checkpoint has counted; None if it has all of them.

    but: a step whose row is written after its checkpoint, so it may be missing.
    """
    lost = (expected or 0) - (log.rows - (log.last == but))
    if lost <= 0:
        return None
    return (
        f"{log.path.name} has lost {lost} of {count_noun(expected or 0, 'row')}: the run goes on, its curves have gaps"
    )


def to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON lines. NaN and infinity, which JSON lacks, become null."""
    return "".join(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def finite(value: Any) -> Any:
    """Return the value with every NaN and infinity replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file, without a torn last line (a kill during a write). Any other broken line raises
    RunError."""
    rows, broken = sound_rows(path)
    for number, line in broken.items():
        raise RunError(
            f"broken line: {line[:SHOWN]}",
            where=f"{path}:{number}",
            hint="remove the line; a resumed run skips it",
        )
    return rows


def sound_rows(path: Path, *, stepped: bool = False) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the valid rows of a file, and the lines that are no JSON object by line number. A torn last line is in
    neither.

    stepped: rows must have an integer `step`.
    """
    if not path.exists():
        return [], {}
    rows, broken = [], dict[int, str]()
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # text after the last newline: empty, or an interrupted write
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None and (not stepped or type(row.get("step")) is int):
            rows.append(row)
        elif number < len(lines) or torn:  # a file system may write the newline before the rest of the line
            broken[number] = line.decode(errors="replace")
    return rows, broken


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
