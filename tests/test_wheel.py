"""The wheel is self-contained: unpacked elsewhere, it runs a shipped recipe with shipped rewards from another
folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_recipes_and_rewards_ship(unpacked: Path) -> None:
    for kind, suffix in (("recipes", "*.yaml"), ("rewards", "*.py")):
        shipped = {p.relative_to(unpacked / "posttrain/shipped" / kind) for p in (unpacked / "posttrain").rglob(suffix)
                   if "shipped" in p.parts and kind in p.parts}  # fmt: skip
        assert shipped == {p.relative_to(ROOT / kind) for p in (ROOT / kind).rglob(suffix)}
        assert shipped


def test_tables_of_other_tools_ship(unpacked: Path) -> None:
    tables = Path("posttrain/recipe/foreign/tables")
    assert {path.name for path in (unpacked / tables).glob("*.yaml")} == {
        p.name for p in (ROOT / tables).glob("*.yaml")
    }
    assert list((ROOT / tables).glob("*.yaml"))


def test_shipped_recipe_runs_from_another_folder(unpacked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    where = run(unpacked, folder, "recipe", "list", "--json").stdout
    assert "debug/rl" in where and str(ROOT) not in where
    done = run(unpacked, folder, "rl", "debug/rl", "run.steps=2", "--output", "my run", "--json")
    assert json.loads(done.stdout)["steps"] == 2
    assert (folder / "my run" / "final" / "model.safetensors").is_file()
    assert "uPlot" in (folder / "my run" / "report.html").read_text(encoding="utf-8")
