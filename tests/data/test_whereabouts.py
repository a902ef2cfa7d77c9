"""Errors about a row name its file and line: when reading, rendering, computing lengths, and in a reward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain import source_locations
from posttrain.data.prepare import prepare_examples, prepare_prompts
from posttrain.data.rows import load_rows
from posttrain.errors import DataError, RewardError, RunError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Data
from posttrain.rollout.engine import check_fits
from posttrain.verify.audit import audit_gold
from posttrain.verify.score import Sample, Scorer

JSONL = Callable[[list[dict[str, Any]]], str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data/a.csv").write_text("prompt,answer\n1+1,2\n1+2,3\n")
    first, second = load_rows(Data(source="my data/a.csv"), tmp_path)
    assert source_locations.describe_row(second["uid"]) == f"my data/a.csv:3 (row {second['uid']})"
    for part in ("/chosen", "@0.6", ".2"):
        assert source_locations.find_location(f"{first['uid']}{part}") == "my data/a.csv:2"
    assert set(first) == {"prompt", "answer", "uid"}, "a row has no column for it"
    assert source_locations.describe_rows([first["uid"], second["uid"]]) == "my data/a.csv:2, 3"


def test_row_without_a_file_is_named_by_its_uid() -> None:
    assert source_locations.describe_row("x7") == "row x7"
    assert (
        source_locations.describe_rows(["a", "b", "a"]) == "rows a, b"
        and source_locations.describe_rows(["a"]) == "row a"
    )
    assert source_locations.describe_rows(["a", "b", "c", "d"]) == "rows a, b, c, ..."


def test_error_when_computing_lengths_names_the_line(jsonl: JSONL, tmp_path: Path, tiny: Any) -> None:
    source = jsonl([{"prompt": "1"}, {"prompt": "1" * 99}])
    with pytest.raises(DataError, match=r"^rows\.jsonl:2 \(row \w{16}\)  \d+ tokens, over data.max_length 50"):
        prepare_prompts(Data(source=source, max_length=50, overlong="error"), tiny, tmp_path)
    with pytest.raises(DataError, match=r"longer than max_length: 2 \(rows\.jsonl:1, 2\)"):
        prepare_prompts(Data(source=source, max_length=1), tiny, tmp_path)
    prepared = prepare_prompts(Data(source=source), tiny, tmp_path)
    with pytest.raises(DataError, match=r"^rows\.jsonl:2 \(row \w{16}\)  prompt of \d+ tokens"):
        check_fits(prepared.items, Sampling(max_new_tokens=10), window=60)


def test_error_for_a_missing_column_names_the_line(jsonl: JSONL, tmp_path: Path, tiny: Any) -> None:
    source = jsonl([{"prompt": "1", "completion": "2"}, {"prompt": "1"}])
    with pytest.raises(DataError, match=r"^rows\.jsonl:2 \(row \w{16}\)  no `completion` to train on") as told:
        prepare_examples(Data(source=source), tiny, tmp_path)
    assert told.value.problems[0].hint == "another row has one: give this row one, or leave out this row"
    with pytest.raises(DataError, match=r"^rows\.jsonl:1 .*\n  hint: write e\.g\. columns"):
        prepare_examples(Data(source=jsonl([{"prompt": "1", "answer": "2"}])), tiny, tmp_path)


@pytest.fixture
def scorer(tmp_path: Path) -> Callable[..., Scorer]:
    def make(use: str, body: str = "", **scoring: Any) -> Scorer:
        (tmp_path / "own.py").write_text(f"def score(completion, answer):\n    {body}\n")
        return Scorer([Reward(use=use)], Scoring(workers=1, **scoring), tmp_path)

    return make


def samples(rows: list[dict[str, Any]]) -> list[Sample]:
    return [
        Sample(completion="x", row=row, prompt="", finish="stop", token_count=1, group=i) for i, row in enumerate(rows)
    ]


def test_error_in_gold_or_reward_names_the_line(jsonl: JSONL, tmp_path: Path, scorer: Callable[..., Scorer]) -> None:
    rows = load_rows(Data(source=jsonl([{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "}"}])), tmp_path)
    with (
        scorer("math.accuracy") as one,
        pytest.raises(RewardError, match=r"\n  rows\.jsonl:2 \(row \w{16}\)  gold has"),
    ):
        audit_gold(one, rows)
    body = "return 1.0 if answer == '1' else 1 / 0"
    with scorer("own.py:score", body, max_error_rate=0.1) as one, pytest.raises(RunError) as told:
        one.failures(enough=2).add(one.score(samples(rows)).calls)
    assert f"the first error, on rows.jsonl:2 (row {rows[1]['uid']}):\n  Traceback" in str(told.value)
    assert all(line.startswith("  ") for line in str(told.value).splitlines()[1:])
    with (
        scorer("own.py:score", "return 1.0 if answer == '1' else 'certainly'") as one,
        pytest.raises(RewardError) as broken,
    ):
        one.score(samples(rows))
    assert f"rows.jsonl:2 (row {rows[1]['uid']}): returned 'certainly'" in str(broken.value)
