"""Watchdog of training phases: names a hang, and ends the process."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.run.watchdog import Watchdog

MINUTES = 0.05 / 60  # a floor of 50 ms


def stuck_in_the_library(event):
    event.wait(5)


def watch(folder, minutes=MINUTES, **changes):
    ended = threading.Event()
    return Watchdog(folder, minutes, poll_s=0.01, stop=ended.set, **changes), ended


def test_hang_is_reported_with_its_stack(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    watchdog, ended = watch(tmp_path)
    with watchdog:
        watchdog.begin_step(6)
        with watchdog.phase("rollout"):
            pass
        with watchdog.phase("sync"):
            stuck_in_the_library(ended)
    assert ended.is_set()
    written = (tmp_path / "hang-rank3.txt").read_text()
    assert written.startswith("rank 3, step 7: the phase `sync` takes longer than")
    assert "stuck_in_the_library" in written
    told = capsys.readouterr().err
    assert "`sync`" in told and "hang-rank3.txt" in told and "run.hang_minutes" in told


def test_phase_may_take_ten_times_its_median(tmp_path):
    watchdog, _ = watch(tmp_path, minutes=1.0)
    assert watchdog.limit("sync") == 360.0  # no median yet: six times the floor
    watchdog._past["sync"] = [1.0, 2.0, 50.0]
    assert watchdog.limit("sync") == 60.0  # ten times the median is less than the floor
    watchdog._past["sync"] = [20.0, 30.0, 500.0]
    assert watchdog.limit("sync") == 300.0


def test_slow_phases_within_their_limit_are_not_interrupted(tmp_path):
    watchdog, ended = watch(tmp_path)
    with watchdog:
        for _ in range(8):  # together longer than the limit of one phase
            with watchdog.phase("rollout"):
                time.sleep(0.03)
        time.sleep(0.4)  # no phase is active
    assert not ended.is_set() and not list(tmp_path.iterdir())


def test_failed_phase_is_no_longer_watched(tmp_path):
    watchdog, ended = watch(tmp_path)
    with watchdog:
        with pytest.raises(ValueError), watchdog.phase("score"):
            raise ValueError
        time.sleep(0.4)
    assert not ended.is_set() and watchdog.times() == {}


def test_recorded_seconds_belong_to_the_step(tmp_path):
    watchdog, _ = watch(tmp_path, minutes=None)
    with watchdog:
        with watchdog.phase("engine start"):
            pass
        watchdog.begin_step(0)
        for _ in range(2):
            with watchdog.phase("rollout"):
                time.sleep(0.01)
    assert list(watchdog.times()) == ["time/rollout"] and watchdog.times()["time/rollout"] >= 0.02


def test_hanging_process_exits_with_code_1(tmp_path):
    """Also if the main thread cannot be interrupted and an `except` would catch everything."""
    code = f"""
import threading
from pathlib import Path
from posttrain.run.watchdog import Watchdog
with Watchdog(Path({str(tmp_path)!r}), {MINUTES}, poll_s=0.01) as watchdog, watchdog.phase("save"):
    while True:
        try:
            threading.Event().wait()
        except BaseException:
            pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "`save`" in done.stderr
    assert (tmp_path / "hang-rank0.txt").is_file()


def test_stopped_child_of_a_hanging_process_ends_too(tmp_path):
    """A stopped process does not notice its parent's end."""
    code = f"""
import multiprocessing, os, signal, time
from pathlib import Path
from posttrain.run.watchdog import Watchdog
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    os.kill(child.pid, signal.SIGSTOP)
    print(child.pid, flush=True)
    with Watchdog(Path({str(tmp_path)!r}), {MINUTES}, poll_s=0.01) as watchdog, watchdog.phase("rollout"):
        time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "`rollout`" in done.stderr
    child, deadline = Path("/proc") / done.stdout.strip(), time.monotonic() + 10
    while child.exists() and "State:\tZ" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "State:\tZ" in (child / "status").read_text()
