"""What validation says of the first rows of a file."""

from __future__ import annotations

import json
from pathlib import Path

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
