"""External faults: the run ends with one sentence, and the directory resumes to the same numbers.

Other files test kill -9 at any moment and within a save (test_killed.py), NaN and a prompt over the window
(test_rl.py), a hanging reward (test_scoring.py), and an engine lost while it samples ahead (test_overlap.py).
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import EngineError, RunError
from posttrain.recipe.load import load_dict
from posttrain.rollout import local_server, server_client, vllm_start
from posttrain.rollout.hf import TransformersEngine
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.run.watchdog import Watchdog
from posttrain.train import rl

Opened = Callable[..., AbstractContextManager[Any]]
RUN: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny", "lora": {"rank": 4}},
    "data": {"source": "rows.jsonl"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
    "rewards": [{"use": "rewards.py:digits"}],
    "scoring": {"workers": 1},
    "optim": {"lr": 5e-3},
    "run": {"steps": 4, "save_every": 1},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    reward = "def digits(completion, token_count):\n    return sum(c.isdigit() for c in completion) / token_count\n"
    (tmp_path / "rewards.py").write_text(reward)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(24)))

    def make(save_every: int | None = 1, **rollout: Any) -> Any:
        values = {**RUN, "rollout": {**RUN["rollout"], **rollout}, "run": {**RUN["run"], "save_every": save_every}}
        if rollout.get("staleness"):
            values["corrections"] = [{"use": "tis"}]
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    return make


def finish_run(opened: Opened, name: str, recipe: Any, *, resume: bool = False) -> list[dict[str, Any]]:
    with opened(name, resume=resume) as directory:
        rl.run(recipe, directory)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(directory.path)]


def test_full_disk_during_a_checkpoint(
    recipe: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of step 3 does not fit: those of 1 and 2 stay, and the run resumes from 2 once there is space.
    Then the disk flips a bit of the last checkpoint: the run resumes from the one before."""
    expected = finish_run(opened, "straight", recipe())
    saved, original = list[Path](), torch.save

    def full(value: Any, path: Path) -> None:
        saved.append(path)
        if len(saved) == 3:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(value, path)

    with monkeypatch.context() as patch, opened("full") as directory:
        patch.setattr(torch, "save", full)
        with pytest.raises(RunError, match=r"(?i)space"):
            rl.run(recipe(), directory)
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    assert finish_run(opened, "full", recipe(), resume=True) == expected
    weights = checkpoints.folder_for(directory.checkpoints, 4) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # the same size: only its hash differs
    assert finish_run(opened, "full", recipe(), resume=True) == expected
    assert weights.read_bytes() == whole, "made anew from step 3"
    assert "step-00000004 is damaged and is not used" in capsys.readouterr().err


def write_unreadable_moments(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"not a pickle")


def write_other_weights(folder: Path) -> None:
    save_file({"other": torch.zeros(1)}, folder / "adapter_model.safetensors")


def truncate_weights(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def delete_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def write_other_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"steps": 3}')


def write_invalid_json(folder: Path) -> None:
    (folder / "state.json").write_text("{")


def write_moments_of_another_model(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.AdamW([weight])
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


SPOILT = [
    write_unreadable_moments,
    write_other_weights,
    truncate_weights,
    delete_weights,
    write_other_state,
    write_invalid_json,
    write_moments_of_another_model,
]


def test_unloadable_checkpoint_is_skipped(recipe: Any, opened: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest is right, but a run cannot load its files: the previous checkpoint is used, and the numbers equal an
    unbroken run's. If none can be loaded, the run does not silently start again."""
    expected = finish_run(opened, "run", recipe())
    with opened("run", resume=True) as directory:
        folders = [checkpoints.folder_for(directory.checkpoints, step) for step in (3, 4)]
    for spoil in SPOILT:
        assert checkpoints.verify(folders[1]), "made anew"
        spoil(folders[1])
        (folders[1] / checkpoints.MANIFEST).unlink()
        checkpoints.seal(folders[1])
        assert finish_run(opened, "run", recipe(), resume=True) == expected, spoil.__name__
        said = capsys.readouterr().err
        assert "step-00000004 cannot be loaded and is not used" in said and "resumed after step 3" in said
        assert checkpoints.verify(folders[1].with_name("step-00000004.unusable")), "set aside, as it was"
    for folder in folders:
        write_invalid_json(folder)
        (folder / checkpoints.MANIFEST).unlink()
        checkpoints.seal(folder)
    with opened("run", resume=True) as directory, pytest.raises(RunError, match="no checkpoint can be loaded"):
        rl.run(recipe(), directory)
    assert [row["step"] for row in read_metrics(directory.path)] == [1, 2, 3, 4], "nothing is cut back"


def test_unwritable_checkpoint_raises_one_sentence(
    recipe: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may refuse for other reasons than being full: in `rl` such an error was once the library's own."""

    def refused(*_: Any) -> None:
        raise RuntimeError("Parent directory does not exist.")

    monkeypatch.setattr(torch, "save", refused)
    told = "the checkpoint of step 1 could not be written: Parent directory does not exist"
    with opened("refused") as directory, pytest.raises(RunError, match=told):
        rl.run(recipe(), directory)


def test_missing_server_at_the_url_raises_with_a_hint(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed for a user: what is wrong, where, what to do, and how to resume."""
    recipe()
    monkeypatch.setattr(server_client, "CONNECT_RETRY_S", 0.1)
    with socket.socket() as silent:  # bound, but not listening
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        values = {**RUN, "rollout": {**RUN["rollout"], "engine": "vllm", "vllm": {"server": {"urls": [url]}}}}
        (tmp_path / "a recipe.yaml").write_text(json.dumps(values))
        result = CliRunner().invoke(app, ["rl", str(tmp_path / "a recipe.yaml"), "--output", str(tmp_path / "a run")])
    assert result.exit_code == 1
    assert f"{url}  no server can be reached there: Connection refused" in result.stderr
    assert "posttrain serve RECIPE --port" in result.stderr and "--resume" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("changes", [{}, {"staleness": 1}], ids=["in turns", "one step ahead"])
@pytest.mark.parametrize("version", [1, 3])
def test_failed_sync_loses_no_step(
    recipe: Any,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: int,
    changes: dict[str, Any],
) -> None:
    """The previous step is finished: it is in the metrics and in a checkpoint. No sync follows the last step."""
    whole = recipe(save_every=None, **changes)
    inner = TransformersEngine.sync
    lost = {"version": 4}

    def sync(self: TransformersEngine, model: Any, version: int) -> None:
        if version == lost["version"]:
            raise EngineError("the engine is gone")
        inner(self, model, version)

    monkeypatch.setattr(TransformersEngine, "sync", sync)
    expected = finish_run(opened, "straight", whole)
    lost["version"] = version
    with opened("broken") as directory, pytest.raises(EngineError, match="the engine is gone"):
        rl.run(whole, directory)
    assert f"saved after step {version}: the next step failed before its update" in capsys.readouterr().err
    assert len(read_metrics(directory.path)) == version
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == version
    lost["version"] = -1
    assert finish_run(opened, "broken", whole, resume=True) == expected


def test_resumed_run_syncs_in_its_first_step(recipe: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part of its first step, whose errors are raised on all ranks; with staleness 1, after the rollouts held by
    the checkpoint."""
    told, inner = list[str](), TransformersEngine.sync
    monkeypatch.setattr(
        TransformersEngine,
        "sync",
        lambda self, model, version: told.append(f"sync {version}") or inner(self, model, version),
    )
    begin = Watchdog.begin_step
    monkeypatch.setattr(Watchdog, "begin_step", lambda self, step: told.append(f"step {step}") or begin(self, step))
    for name, changes in (("in turns", {}), ("ahead", {"staleness": 1})):
        made = recipe(**changes)
        made = made.model_copy(update={"run": made.run.model_copy(update={"keep_checkpoints": 4})})
        straight = finish_run(opened, name, made)
        with opened(name, resume=True) as directory:
            for step in (3, 4):
                shutil.rmtree(checkpoints.folder_for(directory.checkpoints, step))
        told.clear()
        assert finish_run(opened, name, made, resume=True) == straight
        assert told == ["step 2", "sync 2", "step 3", "sync 3"]


def test_killed_server_ends_the_run_which_resumes(
    serving: ModuleType,
    forked_python: str,
    recipe: Any,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """SIGKILL while step 3 updates: the run ends at the following sync, saved; it resumes with a new server of its own,
    which samples for step 4."""
    program = Path(str(serving.__file__))
    root = f"import os, sys, runpy; sys.path[:0] = [{{root!r}}, {str(program.parent)!r}]; "
    run = f"sys.argv.insert(1, str(os.getppid())); runpy.run_path({str(program)!r}, run_name='__main__')"
    monkeypatch.setattr(local_server, "_ENTRY", root + run)
    monkeypatch.setattr(local_server, "sys", SimpleNamespace(executable=forked_python))
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_start, "cache_folder", lambda: tmp_path / "cache")
    elsewhere = recipe(save_every=None, engine="vllm", vllm={"server": {"devices": [1]}})
    expected = finish_run(opened, "straight", elsewhere)
    update = rl.update

    def killing(p: Any, batch: Any, sequences: Any, step: int, rows_of: Any) -> Any:
        if step == 2:
            p.engine.clients[0].process.process.kill()
        return update(p, batch, sequences, step, rows_of)

    with monkeypatch.context() as patch, opened("broken") as directory:
        patch.setattr(rl, "update", killing)
        with pytest.raises(EngineError, match=r"vLLM on the CPU was killed by SIGKILL(.|\n)*--resume"):
            rl.run(elsewhere, directory)
    assert len(read_metrics(directory.path)) == 3
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 3
    assert finish_run(opened, "broken", elsewhere, resume=True) == expected
