"""Restarts after a killed rank: torchrun, or `--gpus N --max-restarts 1`, restarts all processes and the run
resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.run.metrics import read_metrics

LOSS = """
import os, pathlib, signal
from posttrain.loss.pair import dpo

passes = 0

def pair(batch):
    global passes
    passes += 1  # one in each step
    here = os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if passes == 4 and here and pathlib.Path(__file__).with_name("failing").is_file():
        os.kill(os.getpid(), signal.SIGKILL)
    return dpo(batch, reference_free=True)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
STARTS: dict[str, Callable[..., list[str]]] = {
    "torchrun": lambda *args: [*TORCHRUN, "-m", "posttrain", *args],
    "gpus": lambda *args: ["-m", "posttrain", *args, "--gpus", "2", "--max-restarts", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "model"),
    [("torchrun", {}), ("torchrun", {"parallel": {}}), ("gpus", {"parallel": {}})],
    ids=["torchrun-whole", "torchrun-divided", "gpus-divided"],
)
def test_run_resumes_after_a_killed_rank(
    start: str, model: Any, answer: Callable[..., Any], dpo_recipe: Any, tmp_path: Path
) -> None:
    """In the fourth of five steps, without a named directory: rows and weights equal an unbroken run's."""
    del dpo_recipe  # it writes the rows
    (tmp_path / "losses.py").write_text(LOSS)
    recipe = {
        "stage": "dpo",
        "model": {"path": "tiny", **model},
        "data": {"source": "pairs.jsonl"},
        "batch": {"size": 2},
        "optim": {"lr": 1e-3},
        "loss": {"use": "losses.py:pair"},
        "run": {"steps": 5, "save_every": 1},
    }
    unbroken = tmp_path / "unbroken"
    job = {"recipe": recipe, "base_dirs": [str(tmp_path)], "output": str(unbroken), "resume": False}
    assert answer("ranked", **job, ranks=2, lost_sync=None, engine=None) == [0, 0]
    (tmp_path / "failing").touch()
    (tmp_path / "killed.yaml").write_text(json.dumps(recipe))
    subprocess.run([sys.executable, *STARTS[start]("dpo", "killed.yaml")], cwd=tmp_path, check=True, timeout=500)
    (killed,) = tmp_path.glob("runs/killed/*")
    assert len(list(killed.glob("logs/attempt_*"))) == 2
    assert rows_of(killed) == rows_of(unbroken)
    for file in (unbroken / "final").glob("*.safetensors"):
        weights, others = load_file(file), load_file(killed / "final" / file.name)
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(output)]
