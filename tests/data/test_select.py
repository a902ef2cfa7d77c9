"""Rows selected before a run: by benchmarks, by measured pass rates, by scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.recipe.sections import Data

Values = dict[str, Any]


def write(path: Path, rows: list[Values]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five rows, an evaluation of them with rates 0, 0.25, 0.5, 0.75 and 1, and a benchmark."""
    rows = [
        {"prompt": f"What is {n} plus {n}?", "answer": str(2 * n), "reasoning": n + 1, "hard": n == 0} for n in range(5)
    ]
    rows[3] |= {"answer": None, "completion": "six"}
    write(tmp_path / "rows.jsonl", rows)
    uids = [row["uid"] for row in load_rows(Data(source="rows.jsonl"), tmp_path)]
    write(
        tmp_path / "run" / "problems.jsonl", [{"uid": uid, "accuracy": n / 4} for n, uid in enumerate(reversed(uids))]
    )
    write(tmp_path / "bench.jsonl", [{"problem": "what is 77 PLUS 12"}])
    return tmp_path


def select_rows(folder: Path, **select: Any) -> list[str]:
    section = Data.model_validate({"source": "rows.jsonl", "select": select})
    return [row["prompt"].split()[2] for row in load_rows(section, folder)]


def test_selection_rules(folder: Path) -> None:
    """The rate of row n is 1 - n/4; rows keep the order of the data."""
    run = {"run": "run"}
    assert select_rows(folder, pass_rate=[{**run, "low": 0.25, "high": 0.75}]) == ["1", "2", "3"]
    assert select_rows(folder, pass_rate=[{**run, "lowest": 2}]) == ["3", "4"]
    assert select_rows(folder, pass_rate=[{"run": "run/problems.jsonl", "low": 0.25}, {**run, "lowest": 1}]) == ["3"]
    assert select_rows(folder, failed={**run, "solved": 0.5}) == ["3", "4"]
    assert select_rows(folder, failed={**run, "hard": "hard", "copies": 3}) == ["1", "2", "3", "4"]
    assert select_rows(folder, reasoning={"part": "sft"}) == ["0", "1", "2", "3"], "without an answer it is for sft"
    assert select_rows(folder, reasoning={"part": "rl"}) == ["4"]
    assert select_rows(folder, reasoning={"part": "rl", "middle": "rl"}) == ["2", "4"]
    both = {"pass_rate": [{**run, "low": 0.25}], "reasoning": {"part": "sft", "sft_max": 1, "rl_min": 3}}
    assert select_rows(folder, **both) == ["0", "1", "3"], "rules hold one after the other"


def test_copies_have_distinct_names(folder: Path) -> None:
    write(folder / "run" / "problems.jsonl", [{"uid": row["uid"], "accuracy": 0.0} for row in rows(folder)])
    select = {"failed": {"run": "run", "hard": "hard"}}
    found = load_rows(Data.model_validate({"source": "rows.jsonl", "select": select}), folder)
    assert len(found) == 6 and len({row["uid"] for row in found}) == 6
    assert found[0]["prompt"] == found[1]["prompt"]


def rows(folder: Path) -> list[Values]:
    return load_rows(Data(source="rows.jsonl"), folder)


def test_benchmark_removes_rows_that_differ_only_in_numbers(folder: Path) -> None:
    """All five prompts are `what is N plus N`. A prompt of digits alone is kept unless the official rule is used."""
    bench = {"source": "bench.jsonl", "columns": {"prompt": "problem"}}
    with pytest.raises(DataError, match="decontaminate leaves no row of 5"):
        select_rows(folder, decontaminate={"benchmarks": [bench]})
    write(folder / "bench.jsonl", [{"problem": "1 + 1 ="}, {"problem": "Is it so that what is 3 plus 3? no"}])
    assert select_rows(folder, decontaminate={"benchmarks": [bench], "ngram": 5}) == ["0", "1", "2", "4"]
    write(folder / "rows.jsonl", [{"prompt": "2 + 2 ="}, {"prompt": "a word or two"}])
    section: Values = {"benchmarks": [bench]}
    for skip_empty, left in ((True, 2), (False, 1)):
        select = {"decontaminate": {**section, "skip_empty": skip_empty}}
        assert len(load_rows(Data.model_validate({"source": "rows.jsonl", "select": select}), folder)) == left


@pytest.mark.parametrize(
    ("select", "told"),
    [
        ({"pass_rate": [{"run": "nowhere"}]}, "evaluation not found: nowhere"),
        ({"pass_rate": [{"run": "rows.jsonl"}]}, "not the run of a finished evaluation"),
        ({"pass_rate": [{"run": "run", "low": 0.8, "high": 0.9}]}, "pass_rate leaves no row of 5"),
        ({"reasoning": {"part": "rl", "column": "answer"}}, "holds '0', no number"),
        ({"reasoning": {"part": "rl", "rl_min": 9}}, "no row for rl"),
        ({"reasoning": {"part": "sft", "column": "absent"}}, "no row has a score in its column absent"),
    ],
)
def test_invalid_selection_is_an_error(folder: Path, select: Values, told: str) -> None:
    with pytest.raises(DataError, match=told):
        select_rows(folder, **select)


def test_evaluation_of_other_rows_is_an_error(folder: Path) -> None:
    write(folder / "run" / "problems.jsonl", [{"uid": rows(folder)[0]["uid"], "accuracy": 0.5}])
    with pytest.raises(DataError, match="run has pass rates of 1 of 5 rows") as error:
        select_rows(folder, pass_rate=[{"run": "run"}])
    assert "evaluate the same" in str(error.value)
