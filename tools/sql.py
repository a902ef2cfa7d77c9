"""`tools: [{use: sql, params: {database: shop.db}}]`: read-only questions to a SQLite database.

What a query may do, and its bounds on memory and size, are those of SQL rewards (docs/sandbox.md).
"""

import contextlib
import sqlite3
from pathlib import Path

from posttrain.verify.read_only_sql import open_database, run_query


def sql(query: str, *, database: Path, max_rows: int = 20, seconds: float = 5.0) -> str:
    """Ask the database with a SELECT statement. Its tables are in sqlite_master.

    Args:
        query: one SELECT statement
    """
    with contextlib.closing(open_database(Path(database))) as connection:
        found = run_query(connection, query, seconds, first=max_rows + 1)
    if found.rows is None:
        raise ValueError(found.error)
    lines = [" | ".join(found.columns), *(" | ".join(map(str, row)) for row in found.rows[:max_rows])]
    return "\n".join([*lines, *(["(more rows)"] if len(found.rows) > max_rows else [])])


def sample(folder: Path) -> dict:
    """A database for the examples."""
    path = folder / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table goods (name text, price real)")
        connection.executemany("insert into goods values (?, ?)", [("apple", 1.5), ("pear", 2.0)])
    return {"database": str(path)}


EXAMPLES = [
    ({"query": "select name from goods where price > 1.7"}, "name\npear"),
    ({"query": "drop table goods"}, ValueError),
    ({"query": "select load_extension('x')"}, ValueError),
    ({"query": "attach 'other.db' as o"}, ValueError),
]
