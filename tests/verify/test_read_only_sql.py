"""The policy for SQL written by a model, in the reward and in the tool: read-only, bounded in memory and time."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.path_resolution import shipped_folder
from posttrain.registry import load_module
from posttrain.verify import sql
from posttrain.verify.read_only_sql import MAX_RESULT_BYTES, open_database, run_query

DENIED = {
    "a pointer of the tokenizers": "select fts3_tokenizer('simple')",
    "an extension": "select load_extension('x')",
    "a file": "select readfile('/etc/passwd')",
    "a written file": "select writefile('/tmp/x', 'y')",
    "another database": "attach '/tmp/other.db' as o",
    "a copy of the database": "vacuum into '/tmp/copy.db'",
    "a pragma": "pragma query_only = off",
    "a pragma as a table": "select * from pragma_database_list",
    "a table": "create table x (y)",
    "a temporary table": "create temp table x (y)",
    "a row": "insert into t values (1)",
    "a row behind a common table": "with a as (select 1) insert into t select * from a",
    "two statements": "select 1; drop table t",
    "a virtual table": "create virtual table x using fts5(y)",
    "a transaction": "begin exclusive",
    "an explanation": "explain select 1",
    "nothing": "",
    "a comment": "-- select 1",
}
TOO_LARGE = {
    "a blob": "select zeroblob(200000000)",
    "random bytes": "select randomblob(500000000)",
    "a hexadecimal text": "select hex(zeroblob(100000000))",
    "replacements": "select replace(hex(zeroblob(400000)), '0', hex(zeroblob(1000)))",
    "blobs that sum up": "with recursive t(n, b) as (select 1, zeroblob(900000) union all "
    "select n + 1, zeroblob(900000) from t where n < 5000) select b from t",
    "blobs that are sorted": "with recursive t(n, b) as (select 1, randomblob(900000) union all "
    "select n + 1, randomblob(900000) from t where n < 5000) select b from t order by b",
    "blobs that are compared": "with recursive t(n, b) as (select 1, randomblob(900000) union "
    "select n + 1, randomblob(900000) from t where n < 5000) select count(*) from t",
    "concatenation": "with recursive t(n) as (select 1 union all select n + 1 from t where n < 400) "
    "select group_concat(hex(zeroblob(400000))) from t",
    "many columns of blobs": f"select {', '.join(['zeroblob(900000)'] * 200)}",
    "a doubled text": "with recursive t(s) as (select 'x' union all select s || s from t) select s from t",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t (x)")
        connection.executemany("insert into t values (?)", [(1,), (2,), (None,)])
        connection.commit()
    return path


@pytest.fixture
def connection(file: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(open_database(file)) as opened:
        yield opened


@pytest.mark.parametrize("what", [*DENIED, *TOO_LARGE])
def test_forbidden_statement_is_denied_in_the_reward_and_the_tool(
    what: str, file: Path, connection: sqlite3.Connection
) -> None:
    query = {**DENIED, **TOO_LARGE}[what]
    before, started = file.read_bytes(), time.monotonic()
    assert run_query(connection, query, 2.0).rows is None
    assert run_query(sql.database(["create table t (x)"]), query, 2.0).rows is None
    with pytest.raises(ValueError):
        print(load_module(shipped_folder("tools") / "sql.py").sql(query, database=file))
    assert file.read_bytes() == before and time.monotonic() - started < 10


def test_memory_of_queries_is_bounded() -> None:
    """All queries run in a separate process, whose peak size is measured."""
    code = (
        "import resource\nfrom posttrain.verify import sql\nfrom tests.verify.test_read_only_sql import TOO_LARGE\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = [sql.run_query(sql.database(['create table t (x)']), q, 2.0) for q in TOO_LARGE.values()]\n"
        "assert not any(one.rows for one in found)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) >> 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128 + 2 * (MAX_RESULT_BYTES >> 20) + 64  # megabytes


def test_endless_query_is_interrupted(connection: sqlite3.Connection) -> None:
    started = time.monotonic()
    endless = "with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t"
    assert "interrupted" in run_query(connection, endless, 0.1).error
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("query", [
    "select x from t where x is not null order by x",
    "  -- the numbers\nselect x from t where x > 0 order by x",
    "with a as (select x from t) select * from a where x between 1 and 9 order by 1",
    "SELECT x FROM t WHERE lower(x) LIKE '%' AND x IN (1, 2) ORDER BY x",
    "/* all */ select x from (select x, row_number() over (order by x) as n from t where x is not null)",
])  # fmt: skip
def test_reading_statements_run(query: str, connection: sqlite3.Connection) -> None:
    assert run_query(connection, query, 2.0).rows == [(1,), (2,)]


def test_tool_fetches_only_the_first_rows(file: Path) -> None:
    tool = load_module(shipped_folder("tools") / "sql.py").sql
    endless = "with recursive t(n) as (select 1 union all select n + 1 from t) select n from t"
    assert tool(endless, database=file, max_rows=2) == "n\n1\n2\n(more rows)"
    assert tool("select x from t", database=file) == "x\n1\n2\nNone"


def test_database_being_written_is_read_with_its_write_ahead_log(tmp_path: Path) -> None:
    """The rows of a write-ahead log are part of the database."""
    with contextlib.closing(sqlite3.connect(tmp_path / "live.db")) as writer:
        writer.execute("pragma journal_mode = wal")
        writer.execute("create table t (x)")
        writer.execute("insert into t values (7)")
        writer.commit()
        with contextlib.closing(open_database(tmp_path / "live.db")) as reader:
            assert run_query(reader, "select x from t", 1.0).rows == [(7,)]
