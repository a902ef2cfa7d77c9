"""What validation says of the first rows of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import first_rows
from posttrain.errors import DataError
from posttrain.recipe.sections import Data


def test_every_row_that_lacks_what_the_stage_reads_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": None}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((_, check),) = first_rows.checks({"stage": "sft"}, Data(source="r.jsonl"), tmp_path, [])
    with pytest.raises(DataError, match=r"(?s)r.jsonl:2 .*no `completion`.*r.jsonl:3 .*`completion` is null"):
        check()


def test_rewards_of_the_evaluation_read_its_rows(call: Callable[..., Any], folder: Path) -> None:
    """Not those that are trained on, which may have other columns."""
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2", "answer": "2"}) + "\n")
    words = ["recipe", "validate", "r.yaml", "data.source=train.jsonl"]
    evaluation = "eval={every: 1, n: 1, rewards: [{use: math.accuracy}], data: {source: %s}}"
    assert call(*words, evaluation % "held.jsonl").exit_code == 0
    swapped = call(*words[:-1], "data.source=held.jsonl", evaluation % "train.jsonl")
    assert swapped.exit_code == 2
    assert "eval.data has no column `answer`" in swapped.stderr and "eval.data.columns: {answer:" in swapped.stderr


def test_rewards_of_rl_read_the_rows_of_its_evaluation(call: Callable[..., Any], folder: Path) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (folder / "rl.yaml").write_text(
        "stage: rl\nmodel: {path: tiny}\ndata: {source: train.jsonl}\nrewards: [{use: math.accuracy}]\n"
        "eval: {every: 1, data: {source: held.jsonl}}\nrun: {steps: 1}\n"
    )
    told = call("recipe", "validate", "rl.yaml")
    assert told.exit_code == 2 and "eval.data has no column `answer`" in told.stderr
