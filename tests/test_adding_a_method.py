"""The example of docs/adding_a_method.md, run as its reader would run it, in a separate folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding_a_method.md"
EXAMPLE = ROOT / "docs" / "examples" / "soft_ratio"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__", "out")))


def test_test_of_the_example_passes(folder: Path, forked_python: str) -> None:
    command = [forked_python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_recipe_of_the_example_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["rl", "recipe.yaml", "--output", "out"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["grad_norm"] > 0 and 0 < row["faded"] < 1 for row in rows)


def test_code_blocks_of_the_page_equal_the_files() -> None:
    """Every line of the page's blocks on this example is in the files."""
    text = "\n".join(path.read_text() for path in EXAMPLE.iterdir() if path.is_file())
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:3]
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("# soft_ratio.py")]
    assert len(lines) > 15
    assert [line for line in lines if line not in text] == []
