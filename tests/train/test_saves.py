"""Cost of checkpoints: each file is hashed once, the time is in the metrics and counts towards `run.max_minutes`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.recipe.load import load_dict
from posttrain.run import checkpoints
from posttrain.run.jsonl import StepLog
from posttrain.run.metrics import read_metrics
from posttrain.train import rl, sft
from posttrain.train.checkpoint import State

from .conftest import merge_sections

Opened = Callable[..., AbstractContextManager[Any]]
Train = Callable[..., dict[str, Any]]


@pytest.fixture(params=["rl", "sft"])
def train(request: pytest.FixtureRequest, sft_recipe: Any, opened: Opened, tmp_path: Path) -> Train:
    """Return a function that runs a recipe with these keys of `run` in the run directory `run` and returns the
    summary."""
    (tmp_path / "rewards.py").write_text("def size(completion):\n    return float(len(completion))\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(24)))
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "prompts.jsonl"},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "rewards": [{"use": "rewards.py:size"}],
        "scoring": {"workers": 1},
    }

    def run(resume: bool = False, **keys: Any) -> dict[str, Any]:
        with opened(resume=resume) as directory:
            if request.param == "sft":
                return sft.run(sft_recipe(run=keys), directory)
            return rl.run(
                load_dict(merge_sections(base, {"run": keys}), base_dir=tmp_path, where="test").recipe, directory
            )

    return run


def test_saved_steps_report_the_time_of_the_save(train: Train, tmp_path: Path) -> None:
    summary = train(steps=3, save_every=2)
    rows = read_metrics(tmp_path / "run")
    assert [row.get("time/save", 0) > 0 for row in rows] == [False, True, True]
    assert summary["save_seconds"] > sum(row.get("time/save", 0) for row in rows), "the final model is saved too"
    assert summary["train_seconds"] == pytest.approx(sum(row["time/step"] for row in rows))
    seconds = summary["ledger"]["seconds"]
    assert seconds["final_save"] > 0
    assert sum(seconds.values()) == pytest.approx(summary["train_seconds"] + summary["save_seconds"], rel=0.02)


def test_time_limit_reserves_time_for_the_last_saves(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save takes 50 s of 4 minutes: with three saves and two reserved, step 4 is the last one. When started again,
    the run has nothing to do."""
    count = State.count_save
    monkeypatch.setattr(State, "count_save", lambda state, _: count(state, 50.0))
    assert train(steps=500, save_every=1, max_minutes=4)["steps"] == 4
    assert train(steps=500, save_every=1, max_minutes=4, resume=True)["steps"] == 4
    assert [row["time/save"] for row in read_metrics(tmp_path / "run")] == [50.0] * 4


def test_kill_between_a_save_and_its_row_leaves_no_gap(train: Train, tmp_path: Path) -> None:
    train(steps=2, save_every=2)
    path = tmp_path / "run" / "metrics.jsonl"
    whole = read_metrics(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    train(steps=3, save_every=2, resume=True)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1] == {key: value for key, value in whole[1].items() if key != "time/save"}


def test_failed_save_keeps_the_metrics_of_its_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And closes the files, as the end of a run does."""
    opened = list[StepLog]()
    init = StepLog.__init__

    def noted(self: StepLog, *args: Any) -> None:
        init(self, *args)
        opened.append(self)

    monkeypatch.setattr(StepLog, "__init__", noted)
    train(steps=1)
    assert opened and all(log._file.closed for log in opened)
    monkeypatch.setattr(checkpoints, "seal", lambda _: 1 / 0)
    with pytest.raises(RunError, match="the checkpoint of step 2 could not be written"):
        train(steps=2, resume=True)
    assert all(log._file.closed for log in opened)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]


def test_every_file_of_a_checkpoint_is_hashed_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing again right after writing would read the page cache and verify nothing on disk: the disk is verified
    before a resume."""
    hashed = list[str]()
    digest = checkpoints._sha256
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: hashed.append(path.name) or digest(path))
    train(steps=1)
    folder = checkpoints.latest(tmp_path / "run" / "checkpoints")
    assert folder is not None
    files = json.loads((folder / checkpoints.MANIFEST).read_text())["files"]
    assert sorted(hashed) == sorted(Path(name).name for name in files)
