"""Data columns that components need: read from their annotations, checked against rows and keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.columns import RequiredColumn, find_problems, named_columns, refuse_missing
from posttrain.errors import DataError
from posttrain.options import Column, PartialColumn
from posttrain.recipe.load import load_dict
from posttrain.registry import keyword_parameters, load_index
from posttrain.train.assemble import required_columns

ROWS: list[dict[str, Any]] = [
    {"uid": "1", "prompt": "a", "size": 1, "some": None, "word": "x"},
    {"uid": "2", "prompt": "b", "size": 2.5, "some": 3, "word": 1},
    {"uid": "3", "prompt": "c", "size": math.nan, "some": None, "word": True},
]


def factor(batch: Any, *, size: Column = "size", best: PartialColumn | None = None, name: str = "word") -> None: ...


def list_required_columns(**given: Any) -> list[RequiredColumn]:
    return list(named_columns("factors.0", "mine", keyword_parameters(factor), given))


def test_annotations_name_columns() -> None:
    assert keyword_parameters(factor)["size"] == ("Column", "size") and keyword_parameters(factor)["best"] == (
        "PartialColumn | None",
        None,
    )
    assert list_required_columns() == [RequiredColumn("factors.0.size", "mine", "size", True)]
    assert list_required_columns(best="some", size="n")[1:] == [RequiredColumn("factors.0.best", "mine", "some", False)]
    assert load_index()["factor"]["inverse_easiness"]["params"]["column"] == ["Column", "easiness"]


def test_rows_must_hold_the_numeric_columns() -> None:
    """In every row if the component needs one number each, in at least one row if not; NaN is missing; text is not a
    number.
    """
    found = [problem for _, problem in find_problems(ROWS, list_required_columns(best="some"), acts=False)]
    assert [(p.where, p.what) for p in found] == [
        ("row 3", "`mine` reads the column `size`: 1 of 3 rows without a number")
    ]
    assert list(find_problems(ROWS[:2], list_required_columns(best="some"), acts=False)) == []
    with pytest.raises(DataError, match=r"row 1 .*factors.0.size: `mine` reads the column `word` as a number, .* 'x'"):
        refuse_missing(ROWS, list_required_columns(size="word"), acts=False)
    with pytest.raises(DataError, match=r"factors.0.size: .* column `sise`, and the data has none\n.*\n.*sise: size"):
        refuse_missing(ROWS, list_required_columns(size="sise"), acts=False)


def test_columns_measured_by_rollouts_are_not_required_in_the_data() -> None:
    measured = list_required_columns(size="tool_seconds")
    assert list(find_problems(ROWS, measured, acts=True)) == []
    ((_, problem),) = find_problems(ROWS, measured, acts=False)
    assert "`tools` or an `environment`" in problem.hint


FACTOR = """
from posttrain.options import Column

def by_size(batch, *, size: Column = "size"):
    return batch.columns[size]
"""


def recipe(tmp_path: Path, factors: list[Any], **changes: Any) -> dict[str, Any]:
    (tmp_path / "f.py").write_text(FACTOR)
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1+1", "answer": "2", "size": 1}\n{"prompt": "1+2", "answer": "3"}\n'
    )
    return {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rewards": [{"use": "math.accuracy"}],
        "factors": factors,
        "run": {"steps": 1},
        **changes,
    }


def test_recipe_errors_name_missing_columns(tmp_path: Path) -> None:
    values = recipe(tmp_path, [{"use": "f.py:by_size"}, {"use": "duration"}])
    found = required_columns(load_dict(values, base_dir=tmp_path, where="test").recipe)  # type: ignore[arg-type]
    assert [(one.key, one.column) for one in found] == [
        ("factors.0.size", "size"), ("factors.1.column", "tool_seconds"),
    ]  # fmt: skip
