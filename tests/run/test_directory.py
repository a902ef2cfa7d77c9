"""Run directories: files of the start, used directories, resuming, and locks."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import RunError, UserError
from posttrain.run import checkpoints
from posttrain.run.atomic_io import write_json
from posttrain.run.directory import RunDirectory
from posttrain.run.fingerprint import Fact
from posttrain.run.lock import describe_holder, is_locked
from posttrain.run.resolved_recipe import flatten

RESOLVED = {"stage": "sft", "run": {"steps": 3, "seed": 0}, "optim": {"lr": 0.1}}


def open_run(path, resolved=RESOLVED, **kwargs):
    return RunDirectory.open(path, name="toy", text="stage: sft\n", resolved=resolved, **kwargs)


def test_recipe_command_and_environment_are_written_first(tmp_path):
    with open_run(tmp_path / "run") as run:
        assert (run.path / "recipe.yaml").read_text() == "stage: sft\n"
        assert json.loads((run.path / "resolved.json").read_text()) == RESOLVED
        env = json.loads((run.path / "env.json").read_text())
        assert env["packages"]["pydantic"] and env["cpus"] >= 1
        assert run.attempt == 1 and run.logs == run.path / "logs" / "attempt_1"
        assert {p.name for p in run.logs.iterdir()} == {"recipe.yaml", "resolved.json", "env.json"}
        assert run.summary is None
        assert (run.checkpoints, run.final) == (run.path / "checkpoints", run.path / "final")


def test_default_path_contains_recipe_time_and_overrides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = open_run(None), open_run(None)
    assert first.path.parent == Path("runs/toy") and first.path != second.path
    second.close()
    assert open_run(None, resume=True).path == second.path
    with pytest.raises(UserError, match="no run in runs/other"):
        RunDirectory.open(None, name="other", text="", resolved={}, resume=True)


def test_used_directory_raises_with_three_options(tmp_path):
    open_run(tmp_path / "run").close()
    with pytest.raises(UserError) as error:
        open_run(tmp_path / "run")
    assert all(way in str(error.value) for way in ("--resume", "--output NEW_NAME", f"rm -r {tmp_path / 'run'}"))
    assert error.value.exit_code == 2


def test_suggested_rm_command_is_quoted(tmp_path):
    """Without quotes `rm -r runs/my rl` would remove `runs/my` and `rl`."""
    open_run(tmp_path / "my rl").close()
    with pytest.raises(UserError) as error:
        open_run(tmp_path / "my rl")
    assert f"rm -r '{tmp_path / 'my rl'}')" in str(error.value)


def test_file_or_folder_of_another_program_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_run(tmp_path / "file")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(UserError, match="not a run directory"):
        open_run(tmp_path / "photos", resume=True)
    with pytest.raises(UserError, match=r"holds no run: .*photos\n  it has cat\.jpg\n  hint: name another") as error:
        open_run(tmp_path / "photos")
    assert "rm -r" not in str(error.value)  # not a run that we may remove
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_resume_counts_attempts_and_takes_longer_runs(tmp_path):
    open_run(tmp_path / "run").close()
    longer = {**RESOLVED, "run": {"steps": 30, "seed": 0}}
    with open_run(tmp_path / "run", longer, resume=True) as run:
        assert run.attempt == 2
        assert json.loads((run.path / "resolved.json").read_text())["run"]["steps"] == 30
        assert json.loads((run.path / "logs/attempt_1/resolved.json").read_text())["run"]["steps"] == 3


def test_resume_with_another_recipe_names_the_changed_keys(tmp_path):
    open_run(tmp_path / "run").close()
    other = {**RESOLVED, "run": {"steps": 30, "seed": 1}, "optim": {"lr": 0.2, "eps": 1}}
    with pytest.raises(UserError) as error:
        open_run(tmp_path / "run", other, resume=True)
    assert "optim.eps was None, is 1; optim.lr was 0.1, is 0.2; run.seed was 0, is 1" in str(error.value)
    assert "run.steps was" not in str(error.value)
    assert json.loads((tmp_path / "run" / "resolved.json").read_text()) == RESOLVED


MODEL = {**RESOLVED, "model": {"path": "a/model"}, "rewards": [{"use": "r.py:f"}], "data": {"source": "a/rows.jsonl"}}
FILES = {key: Fact(key, key) for key in ("model.path", "rewards[0].use", "data.source")}


def test_resume_accepts_a_model_that_has_moved(tmp_path, capsys):
    open_run(tmp_path / "run", MODEL, inputs=FILES).close()
    moved = {**MODEL, "model": {"path": "b/renamed"}, "data": {"source": "b/rows.jsonl"}}
    open_run(tmp_path / "run", moved, inputs=FILES, resume=True).close()
    assert "model.path was a/model, is b/renamed: the files are the same" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "resolved.json").read_text()) == moved
    with pytest.raises(UserError, match=r"model\.path was 'b/renamed', is 'a/model'(.|\n)*ln -s NEW OLD"):
        other = {**FILES, "model.path": Fact("other", "other")}
        open_run(tmp_path / "run", {**moved, "model": MODEL["model"]}, inputs=other, resume=True)


@pytest.mark.parametrize("change", [{"rewards": [{"use": "r.py:g"}]}, {"data": {"source": "a/renamed.jsonl"}}])
def test_resume_refuses_another_name_in_the_same_file(tmp_path, change):
    """Another function of a script; and the ids of rows, which the order of rows follows, contain the file's name."""
    open_run(tmp_path / "run", MODEL, inputs=FILES).close()
    with pytest.raises(UserError, match="made with another recipe"):
        open_run(tmp_path / "run", {**MODEL, **change}, inputs=FILES, resume=True)


def test_resume_compares_no_argument_that_the_start_did_not_hash(tmp_path):
    """As older versions. Other files that have appeared since are compared: a name may have meant the hub."""
    open_run(tmp_path / "run", inputs={}).close()
    added = {"rewards[0].params.path": Fact("1", "1"), "data.source": Fact("1", "task:own.py:f (1)")}
    open_run(tmp_path / "run", inputs=added, resume=True).close()
    with pytest.raises(UserError, match=r"rewards\[0\]\.params\.path was 1, is 2"):
        open_run(tmp_path / "run", inputs={**added, "rewards[0].params.path": Fact("2", "2")}, resume=True)
    with pytest.raises(UserError, match=r"model\.path was nothing, is here"):
        open_run(tmp_path / "run", inputs={**added, "model.path": Fact("3", "here")}, resume=True)


def test_resume_without_a_run_starts_one(tmp_path, capsys):
    with open_run(tmp_path / "run", resume=True) as run:
        assert run.attempt == 1
    assert "starting from the beginning" in capsys.readouterr().err


def test_resume_in_a_misspelled_directory_names_the_run(tmp_path, capsys):
    """Only a run of the same recipe is named: a run of another recipe may well be started beside it, and a job may be
    queued several times."""
    open_run(tmp_path / "runs" / "first").close()
    for wrong in (tmp_path / "runs" / "frist", tmp_path / "run" / "first"):
        with pytest.raises(UserError) as told:
            open_run(wrong, resume=True)
        assert f"nothing to resume in {wrong}, and {tmp_path / 'runs' / 'first'} holds a run" in str(told.value)
        assert not wrong.exists()
    other = {**RESOLVED, "optim": {"lr": 123.0}}
    capsys.readouterr()
    first = tmp_path / "runs" / "first"
    open_run(tmp_path / "runs" / "frist", other, resume=True).close()
    said = capsys.readouterr().err
    assert f"{first} has a similar name and another recipe: optim.lr was 0.1, is 123.0" in said
    assert "unfinished runs of this recipe" not in said
    open_run(tmp_path / "runs" / "quite-another", resume=True).close()
    assert f"unfinished runs of this recipe: {first}; to go on with one: Ctrl-C" in capsys.readouterr().err
    write_json(first / "summary.json", {})
    open_run(tmp_path / "runs" / "a-third", {**RESOLVED, "x": 1}, resume=True).close()
    assert "runs" not in capsys.readouterr().err.replace(str(tmp_path / "runs"), "")


def test_interrupted_start_can_be_resumed(tmp_path):
    open_run(tmp_path / "run").close()
    (tmp_path / "run" / "resolved.json").unlink()
    with open_run(tmp_path / "run", resume=True) as run:
        assert json.loads((run.path / "resolved.json").read_text()) == RESOLVED


def test_two_processes_cannot_share_a_directory(tmp_path):
    with open_run(tmp_path / "run"):
        code = (
            "from pathlib import Path; from posttrain.run.directory import RunDirectory; import json, sys\n"
            "RunDirectory.open(Path(sys.argv[1]), name='toy', text='', resolved=json.loads(sys.argv[2]), resume=True)"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run"), json.dumps(RESOLVED)], capture_output=True, text=True
        )
        assert other.returncode == 1
        assert "RunError: another process is working in" in other.stderr and "process" in other.stderr
        with pytest.raises(RunError, match="another process is working in"):  # no hint to remove an active run
            open_run(tmp_path / "run")
    open_run(tmp_path / "run", resume=True).close()


HOLD = """
import os, sys, time
from pathlib import Path
from posttrain.run.lock import take_lock
held = take_lock(Path(sys.argv[1]))
if len(sys.argv) > 2 and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_the_holder_of_a_lock_is_named_with_its_state(tmp_path):
    """Running, suspended, and gone with a child that goes on: process, host and start, and what to do."""
    run = tmp_path / "run"
    open_run(run).close()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        with pytest.raises(RunError) as running:
            open_run(run)
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        with pytest.raises(RunError) as suspended:
            open_run(run, resume=True)
        other.kill()
    named = f"another process is working in {run}: process {other.pid} on {socket.gethostname()} since 20"
    assert str(running.value).startswith(named) and "which is running" in str(running.value)
    assert f"stop it with `kill {other.pid}`, or give another --output" in str(running.value)
    assert str(suspended.value).startswith(named) and "which is suspended (Ctrl-Z)" in str(suspended.value)
    assert f"`kill -CONT {other.pid}` (or `fg` in its shell) continues it" in str(suspended.value)
    open_run(run, resume=True).close()


def test_a_lock_that_a_child_of_an_ended_process_holds(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "fork"], stdout=subprocess.PIPE) as other:
        child = int(other.stdout.readline())
        other.wait()
        holder, advice = describe_holder(tmp_path)
        os.kill(child, signal.SIGKILL)
    assert holder.endswith("which has ended; a process that it started goes on")
    assert advice == f"`fuser {tmp_path / '.lock'}` lists that one: stop it"


def test_a_lock_of_another_machine(tmp_path):
    (tmp_path / ".lock").write_text("process 7 on elsewhere since 2026-01-02 03:04:05\n")
    assert describe_holder(tmp_path) == (
        "process 7 on elsewhere since 2026-01-02 03:04:05",
        "wait for it, or stop it on elsewhere",
    )


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"state": "finished", "message": ""}, "(finished)"),
        ({"state": "stopped", "message": "stopped after step 2 of 3"}, "(stopped: stopped after step 2 of 3)"),
        ({"state": "running", "process": 7, "host": "here"}, "(its process 7 on here was killed)"),
    ],
)
def test_a_used_directory_says_how_its_run_ended(tmp_path, status, said):
    open_run(tmp_path / "run").close()
    write_json(tmp_path / "run" / "status.json", status)
    with pytest.raises(UserError, match="the output directory holds a run already: ") as error:
        open_run(tmp_path / "run")
    assert said in str(error.value)


def test_fewer_steps_than_are_done_are_refused_before_anything_is_written(tmp_path):
    """The run stays as it was, and no command is named that would repeat the mistake."""
    with open_run(tmp_path / "run") as run, checkpoints.save_checkpoint(run.checkpoints, 3) as folder:
        (folder / "weights").write_text("w")
    before = (tmp_path / "run" / "resolved.json").read_text()
    fewer = {**RESOLVED, "run": {"steps": 1, "seed": 0}}
    with pytest.raises(UserError, match="3 steps are done already, and 1 is asked for\n  hint: ask for 3 or more"):
        open_run(tmp_path / "run", fewer, resume=True)
    assert (tmp_path / "run" / "resolved.json").read_text() == before
    open_run(tmp_path / "run", resume=True).close()


def test_full_disk_raises_and_keeps_the_old_file(tmp_path, monkeypatch):
    with open_run(tmp_path / "run") as run:
        before = (run.path / "resolved.json").read_text()

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("posttrain.run.atomic_io.os.fsync", full)
        with pytest.raises(RunError, match="no space left on the disk") as error:
            write_json(run.path / "resolved.json", {"a": 1})
        assert "--resume" in str(error.value)
        assert (run.path / "resolved.json").read_text() == before
        assert not list(run.path.glob(".*.tmp"))


def test_flatten_nested_keys():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None}) == {
        "a.b[0]": 1,
        "a.b[1].c": 2,
        "a.d": {},
        "e": None,
    }


def test_checking_the_lock_does_not_block_a_resume(tmp_path):
    """`posttrain runs` and trackers check whether a run is active, possibly at the moment it is resumed."""
    import fcntl
    import threading

    with open_run(tmp_path / "run"):
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run")
    with (tmp_path / "run" / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.03, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        open_run(tmp_path / "run", resume=True).close()
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(RunError, match="another process is working"):
            open_run(tmp_path / "run", resume=True)
