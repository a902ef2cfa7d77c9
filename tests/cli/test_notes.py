"""Unused settings are noted before a run; `data inspect` and `reward test` make the same checks as a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

IDLE = (
    "note: r.yaml:3:35  data.split: does nothing with rows.jsonl, which has no splits and no configurations\n"
    "  hint: remove it\n"
)
RL = (
    "stage: rl\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrewards: [{use: mine.py:score}]\n"
    "scoring: {workers: 1}\nrun: {steps: 1}\n"
)


@pytest.fixture
def idle(folder: Path) -> None:
    text = (folder / "r.yaml").read_text(encoding="utf-8")
    (folder / "r.yaml").write_text(text.replace("rows.jsonl", "rows.jsonl, split: test"), encoding="utf-8")


@pytest.fixture
def rl(folder: Path) -> None:
    (folder / "r.yaml").write_text(RL, encoding="utf-8")
    (folder / "rows.jsonl").write_text('{"prompt": "7?", "answer": "7"}\n', encoding="utf-8")
    (folder / "mine.py").write_text("def score(completion, answer): return float(completion == answer)\n")


@pytest.mark.usefixtures("idle")
def test_run_notes_unused_settings_first(call: Call, stage: Callable[..., None]) -> None:
    stage(lambda *_: {"steps": 1})
    run = call("sft", "r.yaml", "--output", "out")
    assert run.exit_code == 0 and run.stderr.startswith(IDLE + "run directory: out\n")
    assert IDLE in call("sft", "r.yaml", "--dry-run").stderr


@pytest.mark.usefixtures("idle")
def test_validate_notes_unused_settings(call: Call) -> None:
    told = call("recipe", "validate", "r.yaml")
    assert told.exit_code == 0 and told.stderr == IDLE
    (note,) = json.loads(call("recipe", "validate", "r.yaml", "--json").stdout)["notes"]
    assert note["where"] == "r.yaml:3:35" and note["what"].startswith("data.split: does nothing")


@pytest.mark.usefixtures("rl")
@pytest.mark.parametrize("command", [("data", "inspect"), ("reward", "test")])
def test_missing_names_are_reported_together(command: tuple[str, str], call: Call) -> None:
    """All of them at once, in the words of a run, with their lines."""
    wrong = ["data.source=rws.jsonl", "rewards.0.use=mine.py:scor"]
    found, run = call(*command, "r.yaml", *wrong), call("rl", "r.yaml", *wrong)
    assert found.exit_code == 2 and found.stderr == run.stderr
    assert "data.source: data not found: rws.jsonl" in found.stderr and "has no function scor" in found.stderr


@pytest.mark.usefixtures("rl")
def test_missing_model_is_ignored_by_reward_test(call: Call) -> None:
    """`reward test` reads none, and may be asked on a laptop."""
    tried = call("reward", "test", "r.yaml", "model.path=./nowhere")
    assert tried.exit_code == 0, tried.output
    looked = call("data", "inspect", "r.yaml", "model.path=./nowhere")
    assert looked.exit_code == 2 and "command line  model.path: model not found: ./nowhere" in looked.stderr


def test_reward_test_without_rows_raises(call: Call, folder: Path) -> None:
    (folder / "p.yaml").write_text("stage: pairs\ncompletions: c.jsonl\nrewards: [{use: math.accuracy}]\n")
    told = call("reward", "test", "p.yaml")
    assert told.exit_code == 2 and "stage pairs has no rewards of data rows" in told.stderr
