"""Real `posttrain serve` processes used by two training processes: one vLLM is killed within a step, another joins.

As test_served_ranks.py, where stand-ins sample and the metrics can be compared with an undisturbed run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.run.metrics import read_metrics

from .test_rl_vllm import small  # noqa: F401

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow(reason="three vLLM servers start"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

STEPS, PROMPTS, GROUP = 6, 4, 4
RECIPE = """
stage: rl
model: {path: small}
data: {source: rows.jsonl}
rollout:
  engine: vllm
  vllm: {enforce_eager: true, max_model_len: 250, server: servers.txt}
  staleness: 1
  prompts_per_step: 4
  group_size: 4
  max_new_tokens: 200
rewards: [{use: "./digits.py:digits"}]
scoring: {workers: 1}
corrections: [{use: tis}]
optim: {lr: 2e-3}
run: {steps: 6, samples_per_step: 16, save_every: 2}
"""
DIGITS = "def digits(completion, token_count):\n    return sum(c.isdigit() for c in completion) / max(token_count, 1)\n"
COMMAND = [sys.executable, "-m", "posttrain"]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture
def folder(tmp_path: Path, small: Path) -> Path:  # noqa: F811
    assert small.parent == tmp_path
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "digits.py").write_text(DIGITS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(20)))
    (tmp_path / "servers.txt").write_text("http://127.0.0.1:1\n")  # for `serve`, which only checks that it is a recipe
    return tmp_path


@pytest.fixture
def servers(folder: Path) -> Iterator[list[tuple[int, subprocess.Popen[bytes]]]]:
    """(port, `posttrain serve` process) of three ready servers."""
    environment = {**os.environ, "POSTTRAIN_SERVER_TOKEN": "the key of this test"}
    started = []
    try:
        for port in free_ports(3):
            log = (folder / f"serve-{port}.log").open("wb")
            command = [*COMMAND, "serve", "recipe.yaml", "--port", str(port)]
            started.append((port, subprocess.Popen(command, cwd=folder, stderr=log, stdout=log, env=environment)))
        deadline = time.monotonic() + 600
        for port, process in started:
            log_file = folder / f"serve-{port}.log"
            while b"ready: a run connects" not in log_file.read_bytes():
                assert process.poll() is None and time.monotonic() < deadline, log_file.read_text()[-3000:]
                time.sleep(0.5)
        yield started
    finally:
        for _, process in started:
            process.send_signal(signal.SIGTERM)
        for _, process in started:
            process.wait(60)


def vllm_of(serve: subprocess.Popen[bytes]) -> int:
    """Return the vLLM process started by `posttrain serve`."""
    children = Path(f"/proc/{serve.pid}/task/{serve.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"vllm_process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def rows_so_far(output: Path) -> int:
    path = output / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def test_run_survives_a_killed_server_and_uses_a_new_one(
    folder: Path, servers: list[tuple[int, subprocess.Popen[bytes]]]
) -> None:
    """Each prompt has its whole group, and each completion occurs once, with the version of its step."""
    urls = [f"http://127.0.0.1:{port}" for port, _ in servers]
    (folder / "servers.txt").write_text("\n".join(urls[:2]) + "\n")
    output, (port,) = folder / "run", free_ports(1)
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["POSTTRAIN_SERVER_TOKEN"] = "the key of this test"
    ranks = []
    for rank in range(2):
        log = (folder / f"rank-{rank}.log").open("wb")
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        command = [*COMMAND, "rl", "recipe.yaml", "--output", "run"]
        ranks.append(subprocess.Popen(command, cwd=folder, env={**common, **place}, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 600
        while rows_so_far(output) < 2:
            assert ranks[0].poll() is None and time.monotonic() < deadline, (folder / "rank-0.log").read_text()[-3000:]
            time.sleep(0.05)
        os.killpg(vllm_of(servers[0][1]), signal.SIGKILL)
        (folder / "servers.txt").write_text("\n".join(urls[1:]) + "\n")
        assert [process.wait(600) for process in ranks] == [0, 0], (folder / "rank-0.log").read_text()[-3000:]
    finally:
        for process in ranks:
            process.kill()
    said = (folder / "rank-0.log").read_text()
    assert f"{urls[0]}  is dropped: " in said and f"{urls[2]}  joins with version " in said, said
    rows: list[dict[str, Any]] = list(read_metrics(output))
    assert len(rows) == STEPS and sum(row["rollout/servers_lost"] for row in rows) == 1
    assert sum(row["rollout/servers_joined"] for row in rows) == 1 and rows[-1]["rollout/servers"] == 2
    assert all(row["updates"] == 1 for row in rows)
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    counted = Counter((row["step"], row["group"]) for row in samples)
    assert counted == {(step, group): GROUP for step in range(1, STEPS + 1) for group in range(PROMPTS)}
    assert all(row["version"] == max(0, row["step"] - 2) for row in samples)
    texts = [(row["step"], row["group"], row["completion"]) for row in samples]
    assert len(set(texts)) == len(texts), "a completion is there twice"
    assert rows[-1]["mismatch/kl"] < 1, "log-probs are of other weights"
