"""Fixtures that write recipes to a temporary working directory, so that error positions read `r.yaml:3:1`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.load import Loaded, load

SFT = "stage: sft\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 3}\n"
RL = "stage: rl\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 3}\nrewards: [{use: math.accuracy}]\n"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file of the folder; the text is dedented."""

    def write_file(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def loads(write: Callable[..., Path]) -> Callable[..., Loaded]:
    """Return a function that writes a recipe and loads it."""

    def load_text(text: str, *overrides: str, stage: str | None = None) -> Loaded:
        write(text)
        return load("r.yaml", overrides, stage=stage)

    return load_text


@pytest.fixture
def errors(loads: Callable[..., Loaded]) -> Callable[..., str]:
    """Return a function that writes a wrong recipe and returns the text of its error."""

    def error_text(text: str, *overrides: str, stage: str | None = None) -> str:
        with pytest.raises(RecipeError) as caught:
            loads(text, *overrides, stage=stage)
        return str(caught.value)

    return error_text
