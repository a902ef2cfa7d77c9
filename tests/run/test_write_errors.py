"""Write errors of a run: each names its path with a hint, and no existing file is damaged."""

import errno
import os
import resource
from pathlib import Path

import pytest

from posttrain.errors import RunError, UserError
from posttrain.run import checkpoints
from posttrain.run.atomic_io import explain_write_errors, system_error, write_text
from posttrain.run.directory import RunDirectory
from posttrain.run.metrics import MetricsLog

REFUSALS = [
    "EROFS",
    "EACCES",
    "EPERM",
    "EIO",
    "ENOSPC",
    "EDQUOT",
    "EFBIG",
    "EMFILE",
    "ENFILE",
    "ESTALE",
    "ENAMETOOLONG",
]
REFUSALS += ["ELOOP", "ENOTDIR", "EISDIR", "EEXIST", "ENOENT", "EBUSY", "ENXIO"]


class SafetensorError(Exception):
    """Has the name of the library's own error."""


def open_run(path, **more):
    return RunDirectory.open(path, name="r", text="x", resolved={"a": 1}, **more)


@pytest.mark.parametrize("name", REFUSALS)
def test_each_write_error_names_the_path_and_a_hint(name, tmp_path):
    number = getattr(errno, name)
    with pytest.raises(RunError) as told, explain_write_errors(tmp_path / "file"):
        raise OSError(number, os.strerror(number), str(tmp_path / "other"))
    (problem,) = told.value.problems
    full = name in ("ENOSPC", "EDQUOT")
    assert problem.where == str(tmp_path / ("file" if full else "other"))
    assert problem.what == ("no space left on the disk; complete checkpoints are kept" if full else os.strerror(number))
    assert problem.hint


def test_errors_raised_by_libraries_are_recognized(tmp_path):
    refused = SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)")
    with pytest.raises(RunError, match="Permission denied"), explain_write_errors(tmp_path):
        raise refused
    with pytest.raises(ConnectionResetError), explain_write_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    with pytest.raises(KeyError), explain_write_errors(tmp_path):
        raise KeyError("ours")
    assert system_error(FileNotFoundError(errno.ENOENT, "no such file", "nvcc")) is None, "where nothing is written"
    assert system_error(OSError(errno.EROFS, "read-only", "there")) is not None


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EACCES, ""), (errno.EROFS, ""), (errno.ENAMETOOLONG, "/report.html")]
)
def test_write_error_names_the_file_not_its_temporary_name(number, told, tmp_path, monkeypatch):
    """If the folder refuses the file, the folder is named."""

    def refuse(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RunError) as error:
        write_text(tmp_path / "report.html", "")
    assert error.value.problems[0].where == f"{tmp_path}{told}"


def create_file(tmp_path):
    (tmp_path / "out").write_text("mine")


def create_link_below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "file" / "out")


def create_dead_link(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")


def create_link_to_itself(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "out")


def create_file_named_logs(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "logs").write_text("mine")


def create_folder_named_lock(tmp_path):
    (tmp_path / "out" / ".lock").mkdir(parents=True)


@pytest.mark.parametrize(
    "place",
    [
        create_file,
        create_link_below_a_file,
        create_dead_link,
        create_link_to_itself,
        create_file_named_logs,
        create_folder_named_lock,
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_unusable_run_path_raises_and_changes_nothing(place, resume, tmp_path):
    place(tmp_path)
    before = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    with pytest.raises((UserError, RunError)) as told:
        open_run(tmp_path / "out", resume=resume)
    assert "out" in str(told.value)
    after = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert [name for name in after if not name.endswith(".lock")] == [name for name in before if ".lock" not in name]


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000])
def test_too_long_path_raises(name, tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        open_run(tmp_path / name)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "iterdir"])
def test_unwritable_path_is_a_user_error(number, call, tmp_path, monkeypatch):
    """The error is injected, because root is never refused."""
    (tmp_path / "out").mkdir()

    def refuse(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(UserError, match="no run can be written to") as told:
        open_run(tmp_path / "out")
    assert "name another --output" in str(told.value)


def test_foreign_folder_among_the_attempts_is_ignored(tmp_path):
    open_run(tmp_path / "out").close()
    (tmp_path / "out" / "logs" / "attempt_1_old").mkdir()
    with open_run(tmp_path / "out", resume=True) as directory:
        assert directory.attempt == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_folder_in_place_of_a_log_raises(name, tmp_path):
    with open_run(tmp_path / "out") as directory:
        (directory.path / name).mkdir()
        with pytest.raises(RunError, match="Is a directory"):
            (directory.metrics if name == "metrics.jsonl" else directory.samples)(resume_after=None)


def test_file_size_limit_raises_with_a_hint(tmp_path):
    """Checked in a child process, because the limit is per process."""
    if (child := os.fork()) == 0:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        code = 1
        try:
            write_text(tmp_path / "file", "x" * 10_000)
        except RunError as told:
            code = 0 if "ulimit -f" in str(told) and not (tmp_path / "file").exists() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_run_folder_removed_during_the_run_raises(tmp_path):
    import shutil

    with open_run(tmp_path / "out") as directory:
        metrics = directory.metrics(resume_after=None)
        shutil.rmtree(directory.path)
        metrics.write(1, {"x": 1})  # into a file without a name
        with pytest.raises(RunError, match=r"No such file(.|\n)*its folder is gone"):
            write_text(directory.path / "summary.json", "x")
        metrics.close()


def test_checkpoint_below_a_file_raises(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(RunError, match=r"checkpoints"), checkpoints.save_checkpoint(tmp_path / "checkpoints", 1):
        pass
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_failed_flush_of_a_log_raises(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl", None, tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(RunError, match=r"metrics\.jsonl  Input/output error"):
        log.sync()
