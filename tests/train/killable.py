"""Trains in child processes and kills them with SIGKILL or another signal. See test_killed.py and forked.py.

A job is {"recipe", "base_dir", "output", "resume", "kill"}, where kill is null, {"rows", "delay"} (and the "number" of
a signal), {"file": path that must have appeared below the output} or "in save". A child to be killed after some rows
stops before its last row, however late the kill comes on a busy machine: after the last row nothing remains to be done,
because a step is saved before its row is written. The answer is the child's exit status, negative for a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from posttrain import pipeline
from posttrain.errors import Interrupted
from posttrain.recipe.load import load_dict
from posttrain.run.directory import RunDirectory
from posttrain.run.metrics import MetricsLog
from posttrain.train import preference, rl, sft

LAST = b"!"
PATIENCE_S = 2.0
RUNNERS = {"sft": sft.run, "dpo": preference.run, "rl": rl.run, "run": pipeline.run_stage}


def answer(job: dict[str, Any]) -> int:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        train(job, tell)
    os.close(tell)
    if isinstance(job["kill"], dict) and "file" in job["kill"]:
        kill_at(child, Path(job["output"]) / job["kill"]["file"])
    elif isinstance(job["kill"], dict):
        kill_later(child, told, **job["kill"])
    _, status = os.waitpid(child, 0)
    os.close(told)
    return os.waitstatus_to_exitcode(status)


def train(job: dict[str, Any], tell: int) -> None:
    """Train in the child; never returns."""
    code = 1
    try:
        if isinstance(job["kill"], dict) and "rows" in job["kill"]:
            report_rows(tell, job["recipe"]["run"]["steps"] - 1, for_ever="number" not in job["kill"])
        if job["kill"] == "in save":
            die_within_second_save()
        recipe = load_dict(job["recipe"], base_dir=Path(job["base_dir"]), where="job").recipe
        with RunDirectory.open(
            Path(job["output"]), name="job", text="", resolved={}, resume=job["resume"]
        ) as directory:
            RUNNERS[recipe.verb](recipe, directory)
        code = 0
    except Interrupted as stopped:
        code = stopped.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def report_rows(tell: int, last: int, *, for_ever: bool) -> None:
    """Write a byte to `tell` after each row; after the row of step `last`, wait to be killed, or for a signal to
    arrive."""
    write = MetricsLog.write

    def telling(self: MetricsLog, step: int, values: Any) -> None:
        write(self, step, values)
        os.write(tell, LAST if step == last else b".")
        while step == last and for_ever:
            signal.pause()
        if step == last:
            time.sleep(PATIENCE_S)  # a signal handled by the run arrives meanwhile, or has arrived

    MetricsLog.write = telling


def kill_later(child: int, told: int, rows: int, delay: float, number: int = signal.SIGKILL) -> None:
    """Send the signal `delay` seconds after the child has written this number of rows, or all but one. number: the
    signal's number."""
    while rows and (byte := os.read(told, 1)) != LAST:
        if not byte:
            return  # it failed
        rows -= 1
    time.sleep(delay)
    os.kill(child, number)


def kill_at(child: int, file: Path) -> None:
    """Send SIGKILL as soon as the file exists."""
    while not file.exists():
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return  # it ended before
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)


def die_within_second_save() -> None:
    """Write half of the second optimizer file, then end the process."""
    original, count = torch.save, 0

    def half(value: Any, path: Any, *args: Any) -> None:
        nonlocal count
        count += 1
        original(value, path, *args)
        if count == 2:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
