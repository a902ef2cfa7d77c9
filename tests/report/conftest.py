"""Runs in every state, made by a separate process without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EVIL = (
    "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\x1b[31mred\x1b]0;title\x07\u202e"
)
CHILD = """
import json, sys, time
from pathlib import Path
from posttrain.errors import Interrupted, RunError
from posttrain.report.live import keep_report
from posttrain.run.directory import RunDirectory

path, how, evil = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
resolved = {"stage": "rl", "run": {"steps": 9}, "rollout": {"group_size": 4}, "optim": {"lr": float(sys.argv[4])}}
with RunDirectory.open(path, name="r", text="stage: rl\\n", resolved=resolved) as directory, keep_report(directory):
    metrics, samples = directory.metrics(None), directory.samples(None)
    for step in range(1, 6):
        record = {"prompt": f"What is {step}?", "completion": evil, "reward": 0.5, "correct": step > 2,
                  "finish": "length" if step == 3 else "stop", "tokens": 7}
        samples.write(step, [record])
        metrics.write(step, {"reward": step / 10, "correct": step / 10, "rollout/rows": 32,
                             "completions/clipped_ratio": 0.25, "kl": step})
    print("ready", flush=True)
    if how in ("running", "killed"):
        for line in sys.stdin:
            step += 1
            metrics.write(step, {"reward": step / 10, "correct": 0.5, "rollout/rows": 32})
            print("ready", flush=True)
    if how == "failed":
        raise RunError("the reward raised", where="mine.py:3")
    if how == "stopped":
        raise Interrupted("stopped after step 5 of 9", where=str(path))
    (path / "summary.json").write_text(json.dumps({"reward_last": 0.5, "steps": 5}))
"""
MakeRun = Callable[..., tuple[Path, "subprocess.Popen[str]"]]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """make_run(name, how): a run that is running, finished, stopped, failed or killed after its fifth step."""
    children: list[subprocess.Popen[str]] = []

    def make(name: str, how: str, lr: float = 1e-3) -> tuple[Path, subprocess.Popen[str]]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / name), how, EVIL, str(lr)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        children.append(child)
        assert child.stdout
        said = child.stdout.readline()
        assert said == "ready\n", child.communicate()[1]
        if how == "killed":
            os.kill(child.pid, signal.SIGKILL)
        if how != "running":
            child.wait(30)
        return tmp_path / name, child

    yield make
    for child in children:
        child.kill()
        child.communicate()
