"""The example of docs/replay.md, run as its reader would run it, in a separate folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.run.metrics import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "best_of_prompt"


def test_recipe_of_the_example_replays_the_best(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__")))
    done = CliRunner().invoke(app, ["rl", str(folder / "recipe.yaml"), "--output", str(folder / "out")])
    assert done.exit_code == 0, done.output
    rows = read_metrics(folder / "out")
    assert len(rows) == 6 and sum(row["replay/rows"] for row in rows) > 0
    assert all(row["replay/stored"] <= 4 for row in rows), "one for each prompt"
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["reward"] == 1 for sample in samples if "sampled_in_step" in sample)


def test_code_blocks_of_the_page_equal_the_files() -> None:
    text = "\n".join(path.read_text() for path in EXAMPLE.iterdir() if path.is_file())
    page = (ROOT / "docs" / "replay.md").read_text()
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)[1:3]
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if line not in text] == []
