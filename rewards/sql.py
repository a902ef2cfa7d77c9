r"""Text-to-SQL with partial credit: does the query run, give the right rows, and look like the gold query?

rewards:
  - use: sql.execution            # right or wrong, by the rows alone; `answer`: the gold query
    weight: 0
  - use: sql.reasoning_sql        # `db`: an SQLite file, or the statements that build one
    params: {db_root: data/databases}

"Reasoning-SQL", 2503.23157. Queries can read the database and nothing else (docs/sandbox.md). There is no judge model
here: a query with the right rows earns the judge's part too, another does not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.verify.sql import gives_no_rows, sql_reward


def execution(
    completion: str,
    answer: str | None,
    db: str | Sequence[str],
    *,
    order_sensitive: bool = False,
    timeout_s: float = 2.0,
    db_root: Path | None = None,
) -> float | None:
    """1 if the query gives the rows of the gold query, else 0; None if the gold query does not run.

    A query of constants alone is wrong where the gold query reads a table. A gold query without rows is matched by any
    query of a table without rows: leave such rows out. Without order_sensitive the order does not count (BIRD's rule).
    """
    found = reasoning_sql(completion, answer, db, order_sensitive=order_sensitive, timeout_s=timeout_s, db_root=db_root)
    return None if found is None else found["execution"]


def reasoning_sql(
    completion: str,
    answer: str | None,
    db: str | Sequence[str],
    *,
    weights: Mapping[str, float] | None = None,
    ngram: int = 2,
    order_sensitive: bool = False,
    timeout_s: float = 2.0,
    db_root: Path | None = None,
) -> dict[str, float | None] | None:
    """3 execution + 2 judge + syntax + schema + ngram, at most 8; None if the gold query does not run.

    weights: of single parts. order_sensitive: rows must come in the gold's order. timeout_s: for each of the two
    queries; keep both well below the time limit of a call. Logged parts: execution, judge, syntax, schema, ngram.
    """
    if answer is None or not answer.strip():
        return None
    found = sql_reward(
        completion,
        answer,
        db,
        weights=weights,
        ngram=ngram,
        order_sensitive=order_sensitive,
        timeout_s=timeout_s,
        root=db_root,
    )
    return None if found["reward"] is None else found


def _doubt(row: Mapping[str, Any], *, db_root: Path | None = None, timeout_s: float = 2.0, **_: Any) -> str:
    if not isinstance(row.get("answer"), str) or row.get("db") is None:
        return ""
    empty = gives_no_rows(row["answer"], row["db"], timeout_s, db_root)
    return "find no rows, which any query that finds none equals" if empty else ""


DOUBT = {"execution": _doubt, "reasoning_sql": _doubt}

_DB = [
    "CREATE TABLE emp (id INTEGER, name TEXT, pay INTEGER)",
    "INSERT INTO emp VALUES (1, 'Ann', 10), (2, 'Bo', 20), (3, 'Cy', 30)",
]
_GOLD = "SELECT name FROM emp WHERE pay > 15"
_ROW = {"answer": _GOLD, "db": _DB}

EXAMPLES = {
    "execution": [
        ("SELECT name FROM emp WHERE pay >= 20", _ROW, 1.0),
        ("SELECT name FROM emp WHERE pay > 25", _ROW, 0.0),
        ("```sqlite\nSELECT name FROM emp WHERE pay >= 20\n```", _ROW, 1.0),
        ("SELECT 'Bo' UNION SELECT 'Cy'", _ROW, 0.0),
        ("SELECT 1 WHERE 0", {**_ROW, "answer": f"{_GOLD} AND pay < 0"}, 0.0),
        ("SELECT 2", {**_ROW, "answer": "SELECT count(*) FROM emp WHERE pay > 15"}, 0.0),
        ("WITH emp(n) AS (SELECT 2) SELECT n FROM emp", {**_ROW, "answer": f"SELECT count(*) FROM ({_GOLD})"}, 0.0),
        ("SELECT count(id) FROM emp WHERE pay > 15", {**_ROW, "answer": f"SELECT count(*) FROM ({_GOLD})"}, 1.0),
        ("SELECT 1 + 1", {**_ROW, "answer": "SELECT 2"}, 1.0),
        ("SELEC name", _ROW, 0.0),
        ("", _ROW, 0.0),
        ("", {"answer": "SELECT nothing FROM nowhere", "db": _DB}, None),
    ],
    "reasoning_sql": [
        (f"<think>look</think>\n<answer>\n```sql\n{_GOLD};\n```\n</answer>", _ROW, 8.0),
        ("SELECT name FROM emp WHERE pay >= 20", _ROW, {"execution": 1.0, "ngram": 5 / 9, "reward": 7 + 5 / 9}),
        ("SELECT name FROM emp WHERE pay > 25", _ROW, {"reward": 2.75, "execution": 0.0, "syntax": 1.0}),
        ("SELEC name FROM emp", _ROW, {"reward": 2 / 3 + 0.25, "syntax": 0.0}),
        ("DELETE FROM emp", _ROW, {"reward": 1 / 3 + 1 / 8, "syntax": 0.0}),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
            _ROW,
            {"reward": 0.0, "syntax": 0.0},
            {"timeout_s": 0.05},
        ),
        ("", _ROW, 0.0),
        (_GOLD, {"answer": "SELECT nothing FROM nowhere", "db": _DB}, None),
    ],
}

_ROWS = [{"prompt": "Who earns more than 15?", **_ROW}, {"prompt": "How many?", **_ROW, "answer": "SELECT 3 FROM emp"}]
ROWS = {"execution": _ROWS, "reasoning_sql": _ROWS}
