"""Text-to-SQL reward: run a query read-only on its database and compare its rows with those of the gold query."""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.verify.extract import THINK_START, after_think, last_tag
from posttrain.verify.read_only_sql import authorize_reading, open_database, restrict_to_reading, run_query
from posttrain.verify.text import overlap

WEIGHTS = {"execution": 3.0, "judge": 2.0, "syntax": 1.0, "schema": 1.0, "ngram": 1.0}

_FENCE = re.compile(r"```(?:sqlite|(?:postgre|my)?sql)?[^\S\n]*+\n?+(.*?)```", re.DOTALL | re.IGNORECASE)
_TOKEN = re.compile(
    r"(?P<text>'(?:[^']|'')*')|(?P<quoted>\"(?:[^\"]|\"\")*\"|`(?:[^`]|``)*`)|(?P<name>[^\W\d]\w*)"
    r"|(?P<number>\d+(?:\.\d+)?)|<>|<=|>=|!=|\|\||\S"
)


def query_in(completion: str) -> str:
    """Return the SQL of a completion: after the thought, in the last answer block and fence, without a final `;`.

    Nothing after an unclosed `<think>` counts.
    """
    text = after_think(completion).partition(THINK_START)[0]
    block = last_tag(text, "answer")
    text = text if block is None else block
    fences = _FENCE.findall(text)
    return (fences[-1] if fences else text).strip().rstrip(";").rstrip()


def tokens(query: str) -> list[str]:
    """Return lowercased tokens: names, numbers, quoted texts, `<>` `<=` `>=` `!=` `||`, single characters."""
    return [match[0] for match in _TOKEN.finditer(query.lower())]


def names(query: str) -> set[str]:
    """Return the identifiers of a query, lowercased and unquoted; texts in single quotes do not count."""
    names = set()
    for match in _TOKEN.finditer(query.lower()):
        if match["name"]:
            names.add(match["name"])
        elif match["quoted"]:
            names.add(match["quoted"][1:-1])
    return names


def ngram_overlap(a: Sequence[str], b: Sequence[str], n: int = 2) -> float:
    """Compute the overlap of two n-gram sets; without n-grams, 1 if the token lists are equal, else 0."""
    grams = [{tuple(side[i : i + n]) for i in range(len(side) - n + 1)} for side in (a, b)]
    return overlap(*grams) if any(grams) else float(list(a) == list(b))


@functools.lru_cache(maxsize=8)
def _open_database(source: str | tuple[str, ...]) -> sqlite3.Connection:
    """Open a database read-only: a file, or the statements that build it in memory."""
    if isinstance(source, str):
        return open_database(Path(source))
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    for statement in source:
        connection.execute(statement)
    restrict_to_reading(connection)
    return connection


def database(db: str | Sequence[str], root: Path | None = None) -> sqlite3.Connection:
    """Return a read-only connection to a file (below `root`, if given) or to a database built from statements."""
    if isinstance(db, str):
        return _open_database(str(root / db) if root else db)
    return _open_database(tuple(db))


def schema_names(connection: sqlite3.Connection) -> set[str]:
    """Return the names of the tables, views and columns of the database, lowercased."""
    connection.set_authorizer(None)
    try:
        tables = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        ]
        columns = [
            row[0] for table in tables for row in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        ]
    finally:
        connection.set_authorizer(authorize_reading)
    return {name.lower() for name in (*tables, *columns)}


def reads_a_table(connection: sqlite3.Connection, query: str) -> bool:
    """Return whether a valid query opens a table, rather than returning only constants."""
    return any(row[1] in ("OpenRead", "VOpen") for row in connection.execute(f"EXPLAIN {query}"))


def same_rows(a: Sequence[tuple[Any, ...]], b: Sequence[tuple[Any, ...]], order_sensitive: bool = False) -> bool:
    """Return whether two results are equal: as sets (BIRD's rule), or as lists if order_sensitive."""
    return list(a) == list(b) if order_sensitive else set(a) == set(b)


def sql_reward(
    completion: str,
    answer: str,
    db: str | Sequence[str],
    judge: float = 0.0,
    *,
    weights: Mapping[str, float] | None = None,
    ngram: int = 2,
    order_sensitive: bool = False,
    timeout_s: float = 2.0,
    root: Path | None = None,
) -> dict[str, float | None]:
    """Score a query (Reasoning-SQL), at most 8.

    Returns {"reward": weighted sum, "execution", "judge", "syntax", "schema", "ngram"}.

    execution: 1 if the rows equal those of the gold query; a query of constants only (`SELECT 2`) is wrong if the gold
    query reads a table. A gold query without rows is matched by any query of a table that returns no rows.
    judge: 1 if execution is right, else the score of a judge, in [0, 1]. syntax: 1 if the query runs. schema: overlap
    of the tables and columns named in both queries. ngram: overlap of their token n-grams.
    weights: overrides of the defaults, execution 3, judge 2, all others 1.
    A gold query that does not run gives None. The tokenizer and the rules for empty sets are ours. Raises ValueError
    for weights of unknown parts.
    """
    if unknown := sorted((weights or {}).keys() - WEIGHTS.keys()):
        raise ValueError(f"weights of unknown parts: {', '.join(unknown)}; known: {', '.join(WEIGHTS)}")
    connection = database(db, root)
    gold_query, query = answer.strip().rstrip(";").rstrip(), query_in(completion)
    gold = run_query(connection, gold_query, timeout_s)
    if gold.rows is None:
        return {"reward": None, **dict.fromkeys(WEIGHTS, None)}
    found = run_query(connection, query, timeout_s)
    right = found.rows is not None and same_rows(found.rows, gold.rows, order_sensitive)
    right = right and (reads_a_table(connection, query) or not reads_a_table(connection, gold_query))
    items = schema_names(connection)
    parts = {
        "execution": float(right),
        "judge": 1.0 if right else float(judge),
        "syntax": float(found.rows is not None),
        "schema": overlap(names(query) & items, names(gold_query) & items),
        "ngram": ngram_overlap(tokens(query), tokens(gold_query), ngram),
    }
    return {"reward": sum({**WEIGHTS, **(weights or {})}[name] * value for name, value in parts.items()), **parts}


def gives_no_rows(answer: str, db: str | Sequence[str], timeout_s: float = 2.0, root: Path | None = None) -> bool:
    """Return whether a gold query runs and returns no rows, or only nulls, which many wrong queries return too."""
    try:
        gold = run_query(database(db, root), answer.strip().rstrip(";").rstrip(), timeout_s)
    except (sqlite3.Error, OSError):  # already reported by the first call
        return False
    return gold.rows is not None and all(value is None for row in gold.rows for value in row)
