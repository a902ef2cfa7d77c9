"""Guides of docs/guides, run as their readers would: files are written and commands typed in an empty folder.

A block with a title is a file. A `bash` block without a title is typed line by line in the page's order; each command
must succeed (in a block marked `fails`, fail). A `text` block has texts that the output of the previous command must
contain. `console` blocks are for other machines. Blocks below `<!-- slow -->` take minutes or several processes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app

GUIDES = sorted((Path(__file__).parents[1] / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"(<!-- slow -->\n)?^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    language: str
    info: str
    text: str
    slow: bool

    @property
    def file(self) -> str:
        found = TITLE.search(self.info)
        return found[1] if found else ""

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each line without comments."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "bash" and not self.file else []
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    return [
        Block(language, info or "", text, bool(slow))
        for slow, language, info, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def run_page(page: Path, folder: Path, python: str, *, slow: bool) -> Iterator[list[str]]:
    """Run the blocks of a page; yields each command that was run."""
    said = ""
    for block in blocks(page):
        if block.slow and not slow:
            continue
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            missing = [line for line in block.text.split("\n") if line.strip() and line not in said]
            assert missing == [], f"{page.name}: not in the output:\n{said}"
        for command in block.commands:
            code, said = type_in(command, folder, python)
            assert (code != 0) == ("fails" in block.info), f"{page.name}: {shlex.join(command)}\n{said}"
            yield command


def type_in(command: list[str], folder: Path, python: str) -> tuple[int, str]:
    """Return (exit code, output) of a command, run in this process unless it starts several. python: see
    conftest.py."""
    program, *arguments = command
    if program == "posttrain" and "--gpus" not in arguments and arguments[0] != "run":
        result = CliRunner().invoke(app, arguments, prog_name="posttrain")
        return result.exit_code, result.output
    programs = {
        "posttrain": [python, "-m", "posttrain"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }
    assert program in programs, f"a guide types {program}, which this test cannot run"
    done = subprocess.run(
        [*programs[program], *arguments], cwd=folder, capture_output=True, text=True, timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FORKED_PYTHON": python},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_six_guides_have_commands() -> None:
    assert [page.stem for page in GUIDES] == [
        "cluster", "first_hour", "from_trl", "maths_data", "my_preferences", "my_tools",
    ]  # fmt: skip
    for page in GUIDES:
        found = blocks(page)
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(found), "a block that is not read"
        assert sum(len(block.commands) for block in found if not block.slow) >= 2
        assert sum(block.language == "console" for block in found) <= (page.stem == "cluster")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_quick_commands_of_the_guide_run(
    page: Path, tmp_path: Path, forked_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(list(run_page(page, tmp_path, forked_python, slow=False))) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in GUIDES if any(b.slow for b in blocks(p))], ids=lambda page: page.stem)
def test_all_commands_of_the_guide_run(
    page: Path, tmp_path: Path, forked_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = list(run_page(page, tmp_path, forked_python, slow=True))
    assert len(typed) == sum(len(block.commands) for block in blocks(page))


def test_recipes_of_commands_for_other_machines_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes of `console` blocks are validated with their values, but not run."""
    monkeypatch.chdir(tmp_path)
    page = next(page for page in GUIDES if page.stem == "cluster")
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    elsewhere = [b.text for b in blocks(page) if b.language == "console"]
    typed = re.findall(r"posttrain (?:rl|serve) (\S+\.yaml)(.*)", "\n".join(elsewhere))
    assert len(typed) == 2
    for recipe, rest in typed:
        values = [word for word in shlex.split(rest) if re.match(r"[a-z_.]+=", word)]
        code, said = type_in(["posttrain", "recipe", "validate", recipe, *values], tmp_path, sys.executable)
        assert code == 0, said
