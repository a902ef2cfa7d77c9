import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import RunError, UserError
from posttrain.run.atomic_io import write_json
from posttrain.run.directory import RunDirectory, is_locked
from posttrain.run.resolved_recipe import flatten

RESOLVED = {"stage": "sft", "run": {"steps": 3, "seed": 0}, "optim": {"lr": 0.1}}


def open_(path, resolved=RESOLVED, **kwargs):
    return RunDirectory.open(path, name="toy", text="stage: sft\n", resolved=resolved, **kwargs)


def test_everything_about_the_start_is_written_first(tmp_path):
    with open_(tmp_path / "run") as run:
        assert (run.path / "recipe.yaml").read_text() == "stage: sft\n"
        assert json.loads((run.path / "resolved.json").read_text()) == RESOLVED
        env = json.loads((run.path / "env.json").read_text())
        assert env["packages"]["pydantic"] and env["cpus"] >= 1
        assert run.attempt == 1 and run.logs == run.path / "logs" / "attempt_1"
        assert {p.name for p in run.logs.iterdir()} == {"recipe.yaml", "resolved.json", "env.json"}
        assert run.summary is None
        assert (run.checkpoints, run.final) == (run.path / "checkpoints", run.path / "final")


def test_the_default_place_names_recipe_time_and_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = open_(None), open_(None)
    assert first.path.parent == Path("runs/toy") and first.path != second.path
    second.close()
    assert open_(None, resume=True).path == second.path
    with pytest.raises(UserError, match="no run in runs/other"):
        RunDirectory.open(None, name="other", text="", resolved={}, resume=True)


def test_a_used_directory_is_refused_with_three_ways_out(tmp_path):
    open_(tmp_path / "run").close()
    with pytest.raises(UserError) as error:
        open_(tmp_path / "run")
    assert all(way in str(error.value) for way in ("--resume", "--output NEW_NAME", f"rm -r {tmp_path / 'run'}"))
    assert error.value.exit_code == 2


def test_the_command_that_removes_a_run_is_safe_to_paste(tmp_path):
    """Without quotes `rm -r runs/my rl` would remove `runs/my` and `rl`."""
    open_(tmp_path / "my rl").close()
    with pytest.raises(UserError) as error:
        open_(tmp_path / "my rl")
    assert f"rm -r '{tmp_path / 'my rl'}')" in str(error.value)


def test_a_file_and_a_foreign_folder_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_(tmp_path / "file")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(UserError, match="not a run directory"):
        open_(tmp_path / "photos", resume=True)
    with pytest.raises(UserError, match=r"holds no run: .*photos\n  it has cat\.jpg\n  hint: name another") as error:
        open_(tmp_path / "photos")
    assert "rm -r" not in str(error.value)  # it is no run of ours to remove
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_resume_counts_attempts_and_takes_longer_runs(tmp_path):
    open_(tmp_path / "run").close()
    longer = {**RESOLVED, "run": {"steps": 30, "seed": 0}}
    with open_(tmp_path / "run", longer, resume=True) as run:
        assert run.attempt == 2
        assert json.loads((run.path / "resolved.json").read_text())["run"]["steps"] == 30
        assert json.loads((run.path / "logs/attempt_1/resolved.json").read_text())["run"]["steps"] == 3


def test_resume_with_another_recipe_names_the_keys(tmp_path):
    open_(tmp_path / "run").close()
    other = {**RESOLVED, "run": {"steps": 30, "seed": 1}, "optim": {"lr": 0.2, "eps": 1}}
    with pytest.raises(UserError) as error:
        open_(tmp_path / "run", other, resume=True)
    assert "optim.eps was None, is 1; optim.lr was 0.1, is 0.2; run.seed was 0, is 1" in str(error.value)
    assert "run.steps was" not in str(error.value)
    assert json.loads((tmp_path / "run" / "resolved.json").read_text()) == RESOLVED


def test_resume_of_nothing_starts_anew(tmp_path, capsys):
    with open_(tmp_path / "run", resume=True) as run:
        assert run.attempt == 1
    assert "starting from the beginning" in capsys.readouterr().err


def test_resume_in_a_misspelt_directory_names_the_run(tmp_path, capsys):
    """Of the same recipe alone: another one may well be begun beside it, and a job may be queued again and again."""
    open_(tmp_path / "runs" / "first").close()
    for wrong in (tmp_path / "runs" / "frist", tmp_path / "run" / "first"):
        with pytest.raises(UserError) as told:
            open_(wrong, resume=True)
        assert f"nothing to resume in {wrong}, and {tmp_path / 'runs' / 'first'} holds a run" in str(told.value)
        assert not wrong.exists()
    other = {**RESOLVED, "optim": {"lr": 123.0}}
    capsys.readouterr()
    first = tmp_path / "runs" / "first"
    open_(tmp_path / "runs" / "frist", other, resume=True).close()
    said = capsys.readouterr().err
    assert f"{first} has a similar name and another recipe: optim.lr was 0.1, is 123.0" in said
    assert "unfinished runs of this recipe" not in said
    open_(tmp_path / "runs" / "quite-another", resume=True).close()
    assert f"unfinished runs of this recipe: {first}; to go on with one: Ctrl-C" in capsys.readouterr().err
    write_json(first / "summary.json", {})
    open_(tmp_path / "runs" / "a-third", {**RESOLVED, "x": 1}, resume=True).close()
    assert "runs" not in capsys.readouterr().err.replace(str(tmp_path / "runs"), "")


def test_a_start_that_died_before_its_last_file_can_be_resumed(tmp_path):
    open_(tmp_path / "run").close()
    (tmp_path / "run" / "resolved.json").unlink()
    with open_(tmp_path / "run", resume=True) as run:
        assert json.loads((run.path / "resolved.json").read_text()) == RESOLVED


def test_two_processes_cannot_work_in_one_directory(tmp_path):
    with open_(tmp_path / "run"):
        code = (
            "from pathlib import Path; from posttrain.run.directory import RunDirectory; import json, sys\n"
            "RunDirectory.open(Path(sys.argv[1]), name='toy', text='', resolved=json.loads(sys.argv[2]), resume=True)"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run"), json.dumps(RESOLVED)], capture_output=True, text=True
        )
        assert other.returncode == 1
        assert "RunError: another process is working in" in other.stderr and "process" in other.stderr
        with pytest.raises(RunError, match="another process is working in"):  # no hint to remove a run that goes on
            open_(tmp_path / "run")
    open_(tmp_path / "run", resume=True).close()


def test_a_full_disk_is_told_and_leaves_the_old_file(tmp_path, monkeypatch):
    with open_(tmp_path / "run") as run:
        before = (run.path / "resolved.json").read_text()

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("posttrain.run.atomic_io.os.fsync", full)
        with pytest.raises(RunError, match="no space left on the disk") as error:
            write_json(run.path / "resolved.json", {"a": 1})
        assert "--resume" in str(error.value)
        assert (run.path / "resolved.json").read_text() == before
        assert not list(run.path.glob(".*.tmp"))


def test_flatten():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None}) == {
        "a.b[0]": 1,
        "a.b[1].c": 2,
        "a.d": {},
        "e": None,
    }


def test_a_look_at_the_lock_keeps_nobody_out(tmp_path):
    """`posttrain runs` and trackers look whether a run goes on, for an instant in which it may be resumed."""
    import fcntl
    import threading

    with open_(tmp_path / "run"):
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run")
    with (tmp_path / "run" / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.03, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        open_(tmp_path / "run", resume=True).close()
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(RunError, match="another process is working"):
            open_(tmp_path / "run", resume=True)
