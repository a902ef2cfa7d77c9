"""Alternative answers to questions: gathered from runs, confirmed by votes (A^2Search)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.sections import Data
from posttrain.run.jsonl import read_rows

DATA = shipped_folder("recipes") / "data"
Values = dict[str, Any]


def rows_of(name: str, **params: Any) -> list[Values]:
    return load_rows(Data(source=f"{DATA}/evidence.py:{name}", params=params), DATA)


def write(folder: Path, problems: list[Values], completions: list[Values]) -> str:
    folder.mkdir()
    for name, rows in (("problems", problems), ("completions", completions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "completions.jsonl")


def make_record(uid: str, answer: str, shown: str | None = None) -> Values:
    text = f"<think>x</think><answer>{answer}</answer>"
    turns = [{"text": "<search>towns</search>", "calls": [], "reply": shown}, {"text": text, "calls": []}]
    return {"uid": uid, "completion": text, **({"turns": turns} if shown else {})}


def test_alternative_answers_are_judged_once_and_accepted_by_votes(tmp_path: Path) -> None:
    """Two models: of `the Bergen` (also `bergen`, which the second model gives too), `Molde` and `Rome` the judges
    support the first by two of three votes and the second by one of two (a reply without a vote is left out); `Oslo`
    is already known through an alias.
    """
    problems = [
        {"uid": "a", "prompt": "A town?", "row": {"answer": ["Oslo", "Kristiania"], "land": "Norway"}},
        {"uid": "b", "prompt": "2+2?", "row": {"answer": "4"}},
    ]
    first = [make_record("a", "the Bergen", "Bergen is a town."), make_record("a", "kristiania"), make_record("b", "4")]
    runs = [
        write(tmp_path / "one", problems, first),
        write(
            tmp_path / "two",
            problems,
            [make_record("a", "Bergen; Molde"), make_record("a", "rome"), {"uid": "b", "completion": "4"}],
        ),
    ]
    asked = rows_of("questions", runs=runs)
    assert [(row["question"], row["candidate"]) for row in asked] == [
        ("a", "bergen"),
        ("a", "molde"),
        ("a", "rome"),
    ]
    assert "[shown]\nBergen is a town." in asked[0]["prompt"] and "`bergen`" in asked[0]["prompt"]
    said = [["yes", "Yes.", "no"], ["yes", "hm", "no"], ["no, not yes, no", "yes", "no"]]
    judged = write(
        tmp_path / "judged",
        [{"uid": row["uid"], "prompt": row["prompt"], "row": row} for row in asked],
        [{"uid": row["uid"], "completion": text} for row, texts in zip(asked, said, strict=True) for text in texts],
    )
    town, total = rows_of("accept_answers", runs=runs, judged=judged, eta=0.5)
    assert town["answer"] == [["Oslo", "Kristiania"], "bergen", "molde"] and town["land"] == "Norway"
    assert total["answer"] == [["4"]] and total["prompt"] == "2+2?"
    strict = rows_of("accept_answers", runs=runs, judged=judged, eta=0.6)
    assert strict[0]["answer"] == [["Oslo", "Kristiania"], "bergen"]
    with pytest.raises(DataError, match="eta 2"):
        rows_of("accept_answers", runs=runs, judged=judged, eta=2)


@pytest.mark.slow
def test_shipped_pipeline_gathers_answers_and_trains_on_them(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "a2search_tiny", "--output", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    stages = tmp_path / "run" / "seed-0"
    asked = [row["row"]["candidate"] for row in read_rows(stages / "votes" / "problems.jsonl")]
    assert {"bergen", "molde", "turin", "bari"} & set(asked) and not {"oslo", "rome"} & set(asked)
    metrics = read_rows(stages / "search" / "metrics.jsonl")
    assert len(metrics) == 3 and metrics[0]["reward"] > 0
