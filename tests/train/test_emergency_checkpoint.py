"""Emergency checkpoints: an error before an update, or an rl step without a training signal, loses no finished step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import NonFiniteError, RunError
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import (
    assemble,
    checkpoint,
    collect,
    divided_checkpoint,
    hf_trainer,
    rl,
    rollout_source,
    saved_rollouts,
    sft,
    update,
)
from posttrain.train.emergency_checkpoint import save_before_raising

from .conftest import merge_sections

Make = Callable[..., Stage]
Opened = Callable[..., AbstractContextManager[Any]]

REWARDS = """
import os

def digits(completion, token_count, step):
    if step == 2 and os.path.exists("{flag}"):
        raise RuntimeError("no more")
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def never(completion):
    return 0.0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Make:
    """Return a recipe of 4 steps of 4 prompts; the reward `digits` fails in step 3 while a file `broken` exists."""
    (tmp_path / "rewards.py").write_text(REWARDS.replace("{flag}", str(tmp_path / "broken")))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(24)))
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "rewards": [{"use": "rewards.py:digits"}],
        "scoring": {"workers": 1},
        "optim": {"lr": 5e-3},
        "run": {"steps": 4},
    }

    def make(**changes: Any) -> Stage:
        return load_dict(merge_sections(base, changes), base_dir=tmp_path, where="test").recipe

    return make


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(path)]


@pytest.fixture
def generate_beside_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine generate beside the trainer, as an engine on another GPU does."""
    make_engine = assemble.make_engine

    def apart(*args: Any, **more: Any) -> Any:
        engine = make_engine(*args, **more)
        engine.generates_during_updates = True
        return engine

    monkeypatch.setattr(assemble, "make_engine", apart)


def finish_run(opened: Opened, name: str, recipe: Stage, *, resume: bool = False) -> list[dict[str, Any]]:
    with opened(name, resume=resume) as directory:
        rl.run(recipe, directory)
    return timeless(directory.path)


def test_failing_reward_keeps_finished_steps(recipe: Make, opened: Opened, tmp_path: Path) -> None:
    """Without `save_every` the two previous steps were once lost. After a fix, the run resumes exactly."""
    expected = finish_run(opened, "straight", recipe())
    (tmp_path / "broken").touch()
    with opened("broken run") as directory, pytest.raises(RunError, match="no more"):
        rl.run(recipe(), directory)
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    (tmp_path / "broken").unlink()
    assert finish_run(opened, "broken run", recipe(), resume=True) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_asynchronous_save_is_awaited_before_the_error_is_reported(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The next step fails after its update, so it cannot be saved. A checkpoint sealed meanwhile needs no mention, one
    that could not be written does."""
    notes: list[str] = []
    with opened() as directory, ThreadPoolExecutor(1) as thread:

        def finish() -> None:
            time.sleep(0.05)
            if fails:
                raise RunError("no space")
            with checkpoints.save_checkpoint(directory.checkpoints, 2) as unsealed:
                (unsealed / "weights").touch()

        monkeypatch.setattr(divided_checkpoint, "_pending", thread.submit(finish))
        save_before_raising(ValueError(), 2, directory, [], lambda **_: None, whole=False, note=notes.append)
        assert (checkpoints.latest(directory.checkpoints) is None) == fails
    said = ["the newest checkpoint was not written: no space", "not saved after step 2: the next step failed after"]
    assert len(notes) == 2 * fails and all(map(str.startswith, notes, said))


DRIVEN = """
import os

class Driven:
    def start(self, initial):
        return {"now": 8, "heard": []}

    def value(self, state, step):
        return state["now"]

    def update(self, state, metrics, step):
        heard = [*state["heard"], metrics["reward"]]
        if step == 1 and os.path.exists("{flag}"):
            return {"now": 9, "heard": heard} if "{how}" == "asks" else 1 / 0
        return {"now": 8 - len(heard), "heard": heard}
"""


@pytest.mark.parametrize(
    ("how", "told"), [("asks", "a controller asks for 9 new tokens, more than .* 8"), ("breaks", "division by zero")]
)
def test_failing_controller_keeps_finished_steps(
    recipe: Make, opened: Opened, tmp_path: Path, how: str, told: str
) -> None:
    """After step 2 it asks for more than the engine was started for, which depends on metrics; or it raises. After a
    fix, the run resumes exactly: the controller gets each step once."""
    (tmp_path / "driven.py").write_text(DRIVEN.replace("{flag}", str(tmp_path / "broken")).replace("{how}", how))
    made = recipe(controllers={"rollout.max_new_tokens": {"use": "driven.py:Driven"}})
    expected = finish_run(opened, "straight", made)
    assert [row["control/rollout.max_new_tokens"] for row in expected] == [8, 7, 6, 5]
    (tmp_path / "broken").touch()
    with opened("broken run") as directory, pytest.raises(Exception, match=told):
        rl.run(made, directory)
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    (tmp_path / "broken").unlink()
    assert finish_run(opened, "broken run", made, resume=True) == expected


def failing_pass(monkeypatch: pytest.MonkeyPatch, step: int, minibatch: int, error: Exception) -> None:
    """Raise in this forward pass of the update, counted from 1. Every step has two, of one micro-batch each."""
    current, left = update.current_logprobs, 2 * (step - 1) + minibatch

    def failing(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return current(*args)

    monkeypatch.setattr(update, "current_logprobs", failing)


@pytest.mark.parametrize("changes", [{}, {"rollout": {"staleness": 1}, "corrections": ["tis"]}])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("a wrong shape"), "a wrong shape"),
        (torch.OutOfMemoryError("full"), "the GPU has no memory left"),
        (NonFiniteError("a loss"), "a loss"),
    ],
)
def test_error_in_the_first_update_of_a_step_keeps_finished_steps(
    recipe: Make,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    error: Exception,
    told: str,
) -> None:
    """The weights are still those of step 2, and its rollouts exist: the run resumes exactly."""
    made = recipe(**changes, batch={"minibatches": 2}, rewards=[{"use": "rewards.py:digits"}])
    expected = finish_run(opened, "straight", made)
    assert [row["updates"] for row in expected] == [2, 2, 2, 2]
    with monkeypatch.context() as patch, opened("broken run") as directory:
        failing_pass(patch, 3, 1, error)
        with pytest.raises(Exception, match=told):
            rl.run(made, directory)
    assert "saved after step 2: the next step failed before its update" in capsys.readouterr().err
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    assert finish_run(opened, "broken run", made, resume=True) == expected


def test_weights_between_two_updates_are_not_saved(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They belong to no step, and the error says so."""
    failing_pass(monkeypatch, 3, 2, ValueError("a wrong shape"))
    with opened() as directory, pytest.raises(ValueError, match="a wrong shape"):
        rl.run(recipe(batch={"minibatches": 2}), directory)
    assert checkpoints.latest(directory.checkpoints) is None
    told = "not saved after step 2: the next step failed after it had begun to change the weights"
    assert told in capsys.readouterr().err


def test_weights_that_are_not_finite_are_not_saved(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer of step 2 leaves a NaN: older checkpoints, which would be removed for it, are worth more."""

    def poisoned(p: Any, state: Any, *args: Any) -> Any:
        found = step(p, state, *args)
        if state.step == 1:
            next(p.loaded.model.parameters()).data[:] = float("nan")
        return found

    step = rl.step
    monkeypatch.setattr(rl, "step", poisoned)
    with opened() as directory, pytest.raises(NonFiniteError):
        rl.run(recipe(run={"steps": 4}), directory)
    assert checkpoints.latest(directory.checkpoints) is None
    assert "not saved after step 2: its weights are not finite" in capsys.readouterr().err


@pytest.mark.parametrize(("part", "saved"), [("compute_loss", 2), ("get_batch_samples", 2), ("_finish_step", None)])
def test_sft_keeps_finished_steps(
    sft_recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch, rows_of: Any, part: str, saved: int | None
) -> None:
    """The error comes in the second micro-batch of step 3, while its rows are collated, or after it has changed the
    weights."""
    made = sft_recipe()
    expected = rows_of(sft.run, made, "straight")
    whole, left = getattr(hf_trainer.RunLoop, part), 6 if part == "compute_loss" else 3

    def failing(*args: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise ValueError("a wrong shape")
        return whole(*args, **more)

    with monkeypatch.context() as patch, opened("broken run") as directory:
        patch.setattr(hf_trainer.RunLoop, part, failing)
        with pytest.raises(ValueError, match="a wrong shape"):
            sft.run(made, directory)
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert (checkpoints.step_of(newest) if newest else None) == saved
    with opened("broken run", resume=True) as directory:
        sft.run(made, directory)
    assert timeless(directory.path) == expected


def test_existing_checkpoint_is_not_written_again(
    recipe: Make, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save = list[int](), checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda root, state, *a, **k: saved.append(state.step) or save(root, state, *a, **k)
    )
    (tmp_path / "broken").touch()
    with opened() as directory, pytest.raises(RunError, match="no more"):
        rl.run(recipe(run={"steps": 4, "save_every": 1}), directory)
    assert saved == [1, 2]


STALE: dict[str, Any] = {"rollout": {"staleness": 1}, "corrections": ["tis"]}


@pytest.mark.parametrize("save_every", [1, None])
def test_failure_in_rollouts_sampled_ahead_keeps_those_of_the_step(
    recipe: Make, opened: Opened, tmp_path: Path, save_every: int | None
) -> None:
    """Rollouts of step 3 fail before the update of step 2, whose own rollouts are saved and trained on after all."""
    made = recipe(**STALE, run={"steps": 4, "save_every": save_every})
    expected = finish_run(opened, "straight", made)
    (tmp_path / "broken").touch()
    with opened("broken run") as directory, pytest.raises(RunError, match="no more"):
        rl.run(made, directory)
    newest = checkpoints.latest(directory.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) == 1
    assert (newest / rollout_source.QUEUED_FILE).is_file()
    (tmp_path / "broken").unlink()
    assert finish_run(opened, "broken run", made, resume=True) == expected


SLOW = """
import time

def slow(completion, step):
    time.sleep(0.1 * (step == 2))
    return float(len(completion))
"""


@pytest.mark.usefixtures("generate_beside_trainer")
def test_rollouts_in_progress_are_awaited_and_saved(recipe: Make, opened: Opened, tmp_path: Path) -> None:
    """A controller fails before step 3, while an engine beside the trainer samples its rollouts, whose scoring is slow:
    they are saved with step 2."""
    (tmp_path / "slow.py").write_text(SLOW)
    flag = tmp_path / "broken"
    flag.touch()
    (tmp_path / "driven.py").write_text(DRIVEN.replace("{flag}", str(flag)))
    driven = {"kl.coef": {"use": "driven.py:Driven"}}
    made = recipe(**STALE, rewards=[{"use": "slow.py:slow"}], kl={"coef": 0.1}, controllers=driven)
    with opened() as directory, pytest.raises(ZeroDivisionError):
        rl.run(made, directory)
    newest = checkpoints.latest(directory.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) == 2
    (saved,) = json.loads((newest / rollout_source.QUEUED_FILE).read_text())
    assert saved["step"] == 2 and len(saved["rollouts"]) == 16


@pytest.mark.usefixtures("generate_beside_trainer")
@pytest.mark.parametrize(("saved", "kept"), [(True, 1), (False, 2)])
def test_rollouts_of_older_weights_are_not_sampled_again(
    recipe: Make, opened: Opened, tmp_path: Path, saved: bool, kept: int
) -> None:
    """An engine beside the trainer: rollouts of step 3 fail while step 2 trains, and step 3 finds out. A checkpoint of
    step 2 cannot hold them: a checkpoint of step 1 stays the newest; without one, step 2's is written."""
    if saved:
        finish_run(opened, "run", recipe(**STALE, run={"steps": 1}))
    (tmp_path / "broken").touch()
    with opened(resume=saved) as directory, pytest.raises(RunError, match="no more"):
        rl.run(recipe(**STALE), directory)
    newest = checkpoints.latest(directory.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) == kept


@pytest.mark.parametrize("changes", [{"algorithm": "verl_rank"}, {"advantage": {"use": "gae"}}, {}])
def test_step_with_all_groups_dropped_changes_nothing(recipe: Make, opened: Opened, changes: dict[str, Any]) -> None:
    made = recipe(**changes, keep="dynamic_sampling", rewards=[{"use": "rewards.py:never"}], run={"steps": 2})
    with pytest.raises(RunError, match="none of 2 steps made an update"), opened() as directory:
        rl.run(made, directory)
    rows = read_metrics(directory.path)
    assert [row["updates"] for row in rows] == [0, 0]
    assert [row["signal/share"] for row in rows] == [0, 0]


def test_saved_rollouts_of_repeated_steps_are_removed(recipe: Make, opened: Opened) -> None:
    """Killed after step 4, whose checkpoint was not due, and resumed for step 3 only: `compare-methods` once read the
    rollouts of step 4, and step 3's were removed as the older ones."""
    with opened() as directory:
        rl.run(recipe(run={"steps": 4, "save_every": 2, "keep_rollouts": 1}), directory)
    (directory.checkpoints / "step-00000004" / checkpoints.MANIFEST).unlink()
    with opened(resume=True) as directory:
        rl.run(recipe(run={"steps": 3, "keep_rollouts": 1}), directory)
    assert [path.stem for path in saved_rollouts.steps(directory.path)] == ["step-00000003"]
    assert saved_rollouts.read(directory.path).batch.step == 2


def test_ctrl_c_in_the_last_step_leaves_the_final_model(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sft and dpo, nothing remains to be resumed."""
    inner = collect.collect

    def interrupted(ctx: Any, state: Any, *args: Any) -> Any:
        if state.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(ctx, state, *args)

    monkeypatch.setattr(collect, "collect", interrupted)
    with opened() as directory:
        summary = rl.run(recipe(run={"steps": 2}), directory)
    assert summary["steps"] == 2 and (directory.final / "model.safetensors").is_file()
