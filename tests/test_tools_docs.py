"""The examples of docs/tools.md, run as their reader would run them, in a separate folder."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest

from posttrain.errors import RunError
from posttrain.pipeline import run_stage
from posttrain.recipe.load import load
from posttrain.registry import load_module
from posttrain.run.directory import RunDirectory

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "tools"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "my tools", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize("name", ["game", "convert"])
def test_recipes_of_the_page_run(name: str, folder: Path) -> None:
    loaded = load(str(folder / f"{name}.yaml"))
    untrained = pytest.raises(RunError, match="nothing was trained")  # no random model converts a temperature
    with (
        RunDirectory.open(folder / "run", name=name, text=loaded.text, resolved=loaded.resolved) as directory,
        untrained if name == "convert" else contextlib.nullcontext(),
    ):
        run_stage(loaded.recipe, directory)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["turns/mean"] >= 1 for row in rows)
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    if name == "game":
        replies = {turn.get("reply") for sample in samples for turn in sample["turns"]}
        assert replies & {"higher", "lower", "write a number"}
    else:
        assert "fahrenheit" in samples[0]["prompt"]  # the template tells of the tool


def test_tool_passes_its_examples(folder: Path) -> None:
    script = load_module(folder / "temperature.py")
    for given, expected in script.EXAMPLES:
        assert script.fahrenheit(**given) == expected


def test_code_blocks_of_the_page_equal_the_files() -> None:
    """Every line of the page's blocks is in the files."""
    text = "\n".join(path.read_text() for path in EXAMPLE.iterdir() if path.is_file())
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 30
    assert [line for line in lines if line not in text] == []
