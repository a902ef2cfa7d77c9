"""Read-only SQLite for queries written by a model; shared by the reward and the tool. docs/sandbox.md lists the limits.

An authorizer allows only reading: no files, attached databases, extensions or pragmas. Value size, row count, result
size, SQLite's memory and time are limited.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from pathlib import Path
from typing import Any, NamedTuple

MAX_ROWS = 100_000
MAX_VALUE_BYTES = 1_000_000
MAX_RESULT_BYTES = 16_000_000  # of all values of a result
HEAP_BYTES = 128 << 20  # of SQLite in this process: caches, sorters, temporary tables, in-memory databases
STEPS_BETWEEN_CHECKS = 1000

_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_DENIED_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_BEFORE = re.compile(r"\A(?:\s+|--[^\n]*(?:\n|\Z)|/\*.*?\*/)+", re.DOTALL)
_READS = re.compile(r"(?:select|with)\b", re.IGNORECASE)


class Answer(NamedTuple):
    """Rows and column names of a query, or an error."""

    rows: list[tuple[Any, ...]] | None
    error: str = ""
    columns: tuple[str, ...] = ()


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database file for reading. A file without a write-ahead log is opened as immutable and so not locked."""
    path = path.resolve()
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
    restrict_to_reading(connection)
    return connection


def restrict_to_reading(connection: sqlite3.Connection) -> None:
    """Set the limits and the authorizer on a connection.

    The memory limit is per process and can only be lowered later.
    """
    connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    connection.execute("PRAGMA temp_store = MEMORY")  # counts toward the heap limit and creates no files
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.text_factory = lambda data: data.decode(errors="replace")
    for what, most in _LIMITS.items():
        connection.setlimit(what, most)
    connection.set_authorizer(authorize_reading)


def authorize_reading(action: int, _first: str | None, function: str | None, *_: str | None) -> int:
    """Return SQLITE_OK if a statement may perform the action, else SQLITE_DENY (SQLite authorizer callback)."""
    denied = action not in _READING or (
        action == sqlite3.SQLITE_FUNCTION and (function or "").lower() in _DENIED_FUNCTIONS
    )
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


def run_query(connection: sqlite3.Connection, query: str, seconds: float, first: int | None = None) -> Answer:
    """Run one SELECT or WITH and return its rows; any other statement, an error or an exceeded limit gives an error.

    first: maximum number of rows to fetch.
    """
    if not _READS.match(_BEFORE.sub("", query)):
        return Answer(None, "not a SELECT")
    give_up = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > give_up, STEPS_BETWEEN_CHECKS)
    try:
        return _fetch_rows(connection.execute(query), first)
    except MemoryError:
        return Answer(None, f"the query needs more than {HEAP_BYTES >> 20} MB")
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:  # an error in the query
        over = "interrupted" in str(error)
        return Answer(None, f"interrupted after {seconds:g} s" if over else f"{type(error).__name__}: {error}")
    finally:
        connection.set_progress_handler(None, 0)


def _fetch_rows(cursor: sqlite3.Cursor, first: int | None) -> Answer:
    rows: list[tuple[Any, ...]] = []
    size = 0
    try:
        for row in itertools.islice(cursor, first):
            size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if len(rows) == MAX_ROWS:
                return Answer(None, f"more than {MAX_ROWS} rows")
            if size > MAX_RESULT_BYTES:
                return Answer(None, f"more than {MAX_RESULT_BYTES // 1_000_000} MB of values")
            rows.append(row)
        return Answer(rows, columns=tuple(column[0] for column in cursor.description or ()))
    finally:
        cursor.close()
