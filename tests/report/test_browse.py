"""The completions page: two runs joined by problem, text that is never markup, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import UserError
from posttrain.images import png_url
from posttrain.report.browse import write_page


def run_of(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    full = [{"step": 0, "prompt": f"{r['uid']}?", "finish": "stop", "tokens": 3, **r} for r in rows]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in full))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two runs; b has the problems of a in another order, one of them twice, and one additional problem."""
    evil = "</script><script>alert(1)</script>"
    a = [
        {"problem": 0, "uid": "x", "sample": 1, "completion": "one", "correct": True},
        {"problem": 0, "uid": "x", "sample": 0, "completion": evil, "correct": False},
        {"problem": 1, "uid": "y", "sample": 0, "completion": "two", "correct": None},
    ]
    b = [
        {"problem": 0, "uid": "y", "sample": 0, "completion": "three", "correct": True},
        {"problem": 1, "uid": "x", "sample": 0, "completion": "four", "correct": True},
        {"problem": 2, "uid": "x", "sample": 0, "completion": "five", "correct": True},
    ]
    return [run_of(tmp_path / "a", a), run_of(tmp_path / "b c", b)]


def island(page: Path) -> Any:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def test_problems_are_joined_by_uid_and_occurrence(two: list[Path], tmp_path: Path) -> None:
    counts = write_page(two, tmp_path / "page.html")
    assert counts == {"problems": 3, "completions": 6, "only_one_run": 1}
    problems = island(tmp_path / "page.html")["problems"]
    texts = [[[c["completion"] for c in side] for side in p["sides"]] for p in problems]
    assert texts[0][0][1] == "one" and texts[0][1] == ["four"], "samples in order"
    assert texts[1:] == [[["two"], ["three"]], [[], ["five"]]]


def test_model_text_is_never_markup(two: list[Path], tmp_path: Path) -> None:
    write_page(two[:1], tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text()
    assert island(tmp_path / "page.html")["problems"][0]["sides"][0][0]["completion"].startswith("</script>")


def test_pictures_are_shown_with_their_problem(two: list[Path], tmp_path: Path) -> None:
    """They are at its first sample and apply to the whole problem; with two runs those of the first are shown."""
    url = png_url(Pillow.new("RGB", (8, 8), "red"))
    rows = [json.loads(line) for line in (two[0] / "completions.jsonl").read_text().splitlines()]
    rows[1]["pictures"] = [url]
    (two[0] / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_page(two, tmp_path / "page.html")
    assert [problem["pictures"] for problem in island(tmp_path / "page.html")["problems"]] == [[url], [], []]


def test_browse_command(two: list[Path]) -> None:
    result = CliRunner().invoke(app, ["browse", *map(str, two)])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(two[1] / "browse.html")
    assert "6 completions of 3 problems, 1 problem in one run only" in result.stderr


def test_no_completions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no completions\.jsonl here"):
        write_page([tmp_path], tmp_path / "page.html")
    run_of(tmp_path / "empty", [])
    with pytest.raises(UserError, match="is empty"):
        write_page([tmp_path / "empty"], tmp_path / "page.html")
