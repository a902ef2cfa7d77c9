"""`tools: [{use: sql, params: {database: shop.db}}]`: read-only questions to a SQLite database.

The file is opened read-only and immutable, an authorizer lets through nothing but reading, and a query that runs for
too many steps is stopped.
"""

import sqlite3
from pathlib import Path

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def sql(query: str, *, database: Path, max_rows: int = 20, max_steps: int = 10_000_000) -> str:
    """Ask the database with a SELECT statement. Its tables are in sqlite_master.

    Args:
        query: one SELECT statement
    """
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 10_000
        return steps > max_steps

    connection = sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(stop, 10_000)
        cursor = connection.execute(query)
        names = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchmany(max_rows + 1)
    finally:
        connection.close()
    lines = [" | ".join(names), *(" | ".join(map(str, row)) for row in rows[:max_rows])]
    return "\n".join([*lines, *(["(more rows)"] if len(rows) > max_rows else [])])


def sample(folder: Path) -> dict:
    """A database for the examples."""
    path = folder / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table goods (name text, price real)")
        connection.executemany("insert into goods values (?, ?)", [("apple", 1.5), ("pear", 2.0)])
    return {"database": str(path)}


EXAMPLES = [
    ({"query": "select name from goods where price > 1.7"}, "name\npear"),
    ({"query": "drop table goods"}, sqlite3.DatabaseError),
    ({"query": "select load_extension('x')"}, sqlite3.DatabaseError),
    ({"query": "attach 'other.db' as o"}, sqlite3.DatabaseError),
]
