"""The example of docs/samplers.md, run as its reader would run it, in a separate folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.run.metrics import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "easiest_first"


def test_recipe_of_the_example_samples_unequal_groups(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__")))
    done = CliRunner().invoke(app, ["rl", str(folder / "recipe.yaml"), "--output", str(folder / "out")])
    assert done.exit_code == 0, done.output
    rows = read_metrics(folder / "out")
    assert len(rows) == 4 and rows[0]["sampler/smallest_group"] == 4
    assert min(row["sampler/smallest_group"] for row in rows) in (2, 4)
    assert all(row["sampler/largest_group"] == 4 and row["sampler/prompts"] == 4 for row in rows)


def test_code_blocks_of_the_page_equal_the_files() -> None:
    text = "\n".join(path.read_text() for path in EXAMPLE.iterdir() if path.is_file())
    page = (ROOT / "docs" / "samplers.md").read_text()
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)[1:3]
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if line not in text] == []
