"""One vLLM engine over the GPUs of two training processes: weights by CUDA IPC on each GPU, adapters, sleep, memory.

pytest tests/gpu/test_tensor_parallel_gpu.py

Needs two GPUs; about a minute per test. On two H200s the first kind has synced; the other kinds have not run to their
end yet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from posttrain.models import tiny
from posttrain.run.metrics import read_metrics
from tests.gpu.failure_report import failure_report
from tests.gpu.small_llama import small_llama

SCRIPT = Path(__file__).parents[1] / "rollout" / "shared_ranks.py"
GIB = 1 << 30
KINDS = ("full", "lora", "merged")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a bfloat16 Llama whose heads are divisible by two GPUs."""
    tokenizer = tiny.build_tokenizer()
    model = small_llama(tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def gpu_processes() -> set[str]:
    """Return the processes with memory on a GPU, as reported by the driver."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(subprocess.run(command, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_share_an_engine(folder: Path, kind: str) -> None:
    """The probe on both ranks after every sync, requests interrupted by a sync, sleep, and the memory of each GPU after
    the engine is closed."""
    before = gpu_processes()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = json.dumps({"gpu_memory": 0.1, "sleep": True})
    command = [sys.executable, str(SCRIPT), str(folder), kind, settings]
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [(folder / f"rank-{rank}.log").open("wb") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "4"},
            stdout=logs[rank],
            stderr=logs[rank],
        )
        for rank in range(2)
    ]
    until = time.monotonic() + 200
    try:
        codes = [process.wait(max(until - time.monotonic(), 1)) for process in ranks]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], failure_report([*folder.glob("engine-*/engine.log"), *sorted(folder.glob("rank-*.log"))])
    for rank in range(2):
        found = json.loads((folder / f"{kind}-{rank}.json").read_text())
        sizes = {key: round(found[key] / GIB, 2) for key in ("taken", "asleep", "left")}
        print(
            f"\n{kind} rank {rank}: start {found['started_s']:.1f} s, close {found['closed_s']:.1f} s, GiB {sizes},"
            f" probe {[round(gap, 4) for gap in found['gaps']]}, stale {[round(gap, 3) for gap in found['stale']]},"
            f" sync {[round(seconds, 3) for seconds in found['sync_s']]} s"
        )
        assert max(found["gaps"]) < 0.1 and min(found["stale"]) > max(found["gaps"])
        versions = {version for completion in found["cut"] for version in completion}
        assert versions <= {2, 3} and all(completion == sorted(completion) for completion in found["cut"])
        assert len(found["rollouts"]) == 3 * 3 * 3, "three prompts, three samples, three versions"
        assert len(set(found["memory"])) == 1, "a sync keeps memory"
        assert found["taken"] > 8 * GIB and found["asleep"] < found["taken"] / 2 and found["left"] < GIB
    assert gpu_processes() <= before, "a process of vLLM is left on a GPU"


def test_rl_run_with_a_shared_engine_takes_three_steps(folder: Path) -> None:
    """`posttrain rl --gpus 2`: every sync is probed on both ranks, and the training log-probs equal the engine's."""
    before = gpu_processes()
    changes = [f"model.path={folder / 'model'}", "rollout.engine=vllm", "run.steps=3", "rollout.vllm.tensor_parallel=2"]
    changes += ["rollout.vllm.enforce_eager=true", "rollout.vllm.gpu_memory=0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", "rl", "debug/rl", *changes, "--gpus", "2", "--json",
         "--output", str(folder / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "4"}, capture_output=True, text=True, cwd=folder, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, failure_report(folder.rglob("engine.log"), done.stderr)
    assert json.loads(done.stdout)["steps"] == 3
    rows = read_metrics(folder / "run")
    assert len(rows) == 3 and all(row["mismatch/mean"] < 0.1 for row in rows)
    print(f"\nmismatch {[round(row['mismatch/mean'], 4) for row in rows]}")
    seconds = {key: [round(row[f"time/{key}"], 2) for row in rows[1:]] for key in ("step", "sync")}
    print(f"seconds of {seconds}")
    assert gpu_processes() <= before, "a process of vLLM is left on a GPU"
