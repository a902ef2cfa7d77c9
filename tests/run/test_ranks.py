"""Launcher of several processes, with small scripts in place of a run: exits, errors and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from posttrain.errors import RunError, UserError
from posttrain.run import ranks
from posttrain.run.directory import RunDirectory


def script(tmp_path: Path, body: str) -> list[str]:
    """Return a command that runs `body` with `rank` and `world` set."""
    head = 'import os, signal, sys, time\nrank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])\n'
    path = tmp_path / "script.py"
    path.write_text(head + textwrap.dedent(body))
    return [sys.executable, str(path)]


def test_processes_get_their_rank_and_world_size(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    command = script(tmp_path, f'open(f"{tmp_path}/{{rank}}", "w").write(" ".join(os.environ[n] for n in {names}))')
    assert ranks.launch(command, 3) == 0
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [f[:4] for f in found] == [[str(rank), str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({f[4] for f in found}) == 1


def test_port_of_the_tcpstore_is_reserved(tmp_path: Path) -> None:
    """No other process can take it before rank 0 listens, and rank 0 listens as torch's TCPStore does."""
    body = f"""
        import socket
        port, taken = int(os.environ["MASTER_PORT"]), "{tmp_path}/taken"
        if rank == 1:
            try:
                socket.socket().bind(("127.0.0.1", port))
            except OSError as error:
                open(taken, "w").write(error.strerror)
            sys.exit()
        while not os.path.exists(taken):
            time.sleep(0.02)
        store = socket.socket(socket.AF_INET6)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("::", port))
        store.listen()
        socket.create_connection(("127.0.0.1", port)).close()
    """
    assert ranks.launch(script(tmp_path, body), 2) == 0
    assert (tmp_path / "taken").read_text() == "Address already in use"


@pytest.fixture
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the grace period for ranks that would wait forever."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)


@pytest.mark.usefixtures("little_grace")
def test_first_failure_ends_all_and_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 would wait forever; rank 1 prints an error and exits with 2."""
    began = time.monotonic()
    body = 'time.sleep(60 * (rank != 1)); print("no such column", file=sys.stderr); sys.exit(2)'
    assert ranks.launch(script(tmp_path, body), 3) == 2
    assert time.monotonic() - began < ranks.GRACE_S + 5
    assert capfd.readouterr().err == "rank 1: no such column\n"


def test_error_printed_by_rank_0_is_not_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = 'time.sleep(0.3 * (rank == 0)); print("no such column", file=sys.stderr); sys.exit(2)'
    assert ranks.launch(script(tmp_path, body), 2) == 2
    assert capfd.readouterr().err == "no such column\n"


@pytest.mark.usefixtures("little_grace")
def test_killed_rank_is_named(tmp_path: Path) -> None:
    body = 'print("step 3", flush=True); rank or time.sleep(60); os.kill(os.getpid(), signal.SIGKILL)'
    with pytest.raises(RunError, match=r"(?s)rank 1 was killed by signal 9 \(SIGKILL\).*step 3.*memory runs out"):
        ranks.launch(script(tmp_path, body), 2)


@pytest.mark.usefixtures("little_grace")
def test_memory_hint_is_only_for_sigkill(tmp_path: Path) -> None:
    body = "rank or time.sleep(60); os.kill(os.getpid(), signal.SIGTERM)"
    with pytest.raises(RunError, match=r"rank 1 was killed by signal 15 \(SIGTERM\)") as told:
        ranks.launch(script(tmp_path, body), 2)
    assert "memory" not in str(told.value)


def test_ctrl_c_is_sent_to_rank_0_only_and_all_ranks_may_finish(tmp_path: Path) -> None:
    """Rank 0 notes the signal and informs the other rank through a file; in a run it uses the next collective."""
    body = f"""
        stop, ready = "{tmp_path}/stop", f"{tmp_path}/ready-{{rank}}"
        got = []
        signal.signal(signal.SIGINT, lambda *_: got.append(1))
        open(ready, "w").close()
        while not (got or os.path.exists(stop)):
            time.sleep(0.02)
        open(stop, "w").close()
        from posttrain.run import ranks
        with ranks.defer_shutdown():
            time.sleep(0.3)
        time.sleep(4 * rank)  # it may close what it has, longer than a rank may after an error
        open(f"{tmp_path}/saved-{{rank}}-{{len(got)}}", "w").close()
        sys.exit(130)
    """
    code = f"import sys; from posttrain.run import ranks; sys.exit(ranks.launch({script(tmp_path, body)!r}, 2))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=120) == 130
    assert {p.name for p in tmp_path.glob("saved-*")} == {"saved-0-1", "saved-1-0"}


def test_rank_0_can_finish_a_checkpoint_after_another_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports when it writes; it is not killed during the write, and is killed afterwards."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    body = f"""
        from posttrain.run import ranks
        if rank == 1:
            sys.exit(2)
        with ranks.defer_shutdown():
            time.sleep(2)
            open("{tmp_path}/saved", "w").close()
        time.sleep(60)
    """
    assert ranks.launch(script(tmp_path, body), 2) == 2
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("number", "times", "body", "told"),
    [
        (signal.SIGINT, 2, "signal.signal(signal.SIGINT, signal.SIG_IGN)", "stopped immediately"),
        (signal.SIGTERM, 1, "", "stopped by SIGTERM before the first step"),
    ],
)
def test_signal_that_rank_0_cannot_handle_ends_the_run(
    tmp_path: Path, number: int, times: int, body: str, told: str
) -> None:
    """Rank 0 may wait for other ranks inside a library. Before there is anything to save, SIGTERM just ends the run."""
    command = script(tmp_path, f'{body}\nopen(f"{tmp_path}/ready-{{rank}}", "w").close()\ntime.sleep(60)')
    code = f"from posttrain.run import ranks; ranks.GRACE_S = 0.5; ranks.launch({command!r}, 2)"
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None
        time.sleep(0.02)
    for _ in range(times):
        launcher.send_signal(number)
        time.sleep(0.3)
    assert f"Interrupted: {told}" in launcher.communicate(timeout=55)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_start_leaves_no_process(tmp_path: Path, number: int) -> None:
    """On a busy machine the first process runs long before the last one has started."""
    command = script(tmp_path, f'open(f"{tmp_path}/{{os.getpid()}}", "w").close()\ntime.sleep(60)')
    code = f"""
import os, time
from posttrain.run import ranks
start = ranks._start
def slow(*given):
    process = start(*given)
    while process.rank == 0 and not os.path.exists(f"{tmp_path}/{{process.popen.pid}}"):
        time.sleep(0.02)
    os.kill(os.getpid(), {int(number)})
    return process
ranks._start, ranks.GRACE_S = slow, 0.5
ranks.launch({command!r}, 2)
"""
    launcher = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=50)
    assert "Interrupted: stopped" in launcher.stderr
    started = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    assert started and not [pid for pid in started if os.path.exists(f"/proc/{pid}")]


def test_ctrl_c_before_the_first_save_ends_all_ranks_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 handles it while it loads; the others may wait for it inside a library for hours."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    began = time.monotonic()
    assert ranks.launch(script(tmp_path, "time.sleep(60 * (rank != 0)); sys.exit(130)"), 2) == 130
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("visible", "own"), [(None, "1"), ("4,6", "6"), ("", "")])
def test_each_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, visible: str | None, own: str) -> None:
    for name in (
        "CUDA_VISIBLE_DEVICES",
        ranks.VISIBLE_DEVICES,
    ):  # restores the variable that the call sets, also if it was unset
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": visible}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    ranks.claim_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert os.environ["LOCAL_RANK"] == "0"


def test_more_processes_than_gpus_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="lists 2"):
        ranks.claim_gpu()


def test_ranks_above_0_write_nothing(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", name="r", text="", resolved={}) as directory:
        before = sorted(p for p in directory.path.rglob("*"))
        follower = RunDirectory.follow(directory.path, directory.attempt)
        follower.metrics(None).write(1, {"loss": 1.0})
        follower.samples(None).write(1, [{"prompt": "a"}])
        follower.close()
        assert sorted(p for p in directory.path.rglob("*")) == before
        assert follower.logs == directory.logs


@pytest.mark.usefixtures("little_grace")
def test_failed_processes_are_restarted_up_to_max_restarts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once killed, once failed with an error of rank 0; the third start succeeds."""
    body = f"""
        start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        open(f"{tmp_path}/{{start}}-{{rank}}", "w").close()
        if start == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if start == 1 and rank == 0:
            print("no answer", file=sys.stderr)
            sys.exit(1)
        time.sleep(60 * (start < 2))
    """
    assert ranks.launch(script(tmp_path, body), 2, max_restarts=2) == 0
    assert len(list(tmp_path.glob("?-?"))) == 6
    told = capfd.readouterr().err
    assert "rank 1 was killed by signal 9" in told and told.count("no answer") == 1
    assert [line for line in told.splitlines() if line.startswith("restart")] == [
        "restart 1 of 2: all 2 processes, from the newest checkpoint",
        "restart 2 of 2: all 2 processes, from the newest checkpoint",
    ]


@pytest.mark.parametrize(
    ("body", "code", "starts"),
    [
        *((f"sys.exit({code})", code, starts) for code, starts in ((1, 2), (2, 1), (143, 1))),
        ("sys.exit(1 + (rank == 1))", 2, 1),
        (
            "from posttrain.cli import guard\nfrom posttrain.errors import NonFiniteError, PeerLost\n"
            "def fail(): raise NonFiniteError('NaN') if rank else PeerLost('rank 1 failed')\n"
            "try: guard.run_guarded({}, fail)\nexcept Exception as error: sys.exit(error.exit_code)",
            1,
            1,
        ),
    ],
)
@pytest.mark.usefixtures("little_grace")
def test_deterministic_failures_are_not_restarted(
    tmp_path: Path, body: str, code: int, starts: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong input, also on some ranks only; a stop; and an error of one rank that no restart fixes."""
    mark = f'open("{tmp_path}/" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()'
    assert ranks.launch(script(tmp_path, f"{mark}\n{body}"), 2, max_restarts=1) == code
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == starts
    assert ("not restarted" in capfd.readouterr().err) == ("NaN" in body)
