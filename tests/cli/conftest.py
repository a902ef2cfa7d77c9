"""Fixtures that call the command line in this process, in an empty folder, with a stage runner chosen by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app

SFT = "stage: sft\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 3}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a recipe `r.yaml` and its `rows.jsonl`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(SFT, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A hub that has every id. A test sets the reason for a missing one: `hub["org/x"] = "..."`."""
    absent: dict[str, str] = {}
    monkeypatch.setattr("posttrain.hub.explain_missing", lambda name, _kind: absent.get(name, ""))
    return absent


@pytest.fixture
def call() -> Callable[..., Any]:
    """`call("sft", "r.yaml")` returns typer's result (exit_code, stdout, stderr)."""

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments), prog_name="posttrain")

    return invoke


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace `run_stage` by a function."""

    def replace(function: Callable[..., Any]) -> None:
        monkeypatch.setattr("posttrain.pipeline.run_stage", function)

    return replace
