"""One vLLM engine with two workers for two training processes, also with the CPU build (make test-vllm)."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import EngineError
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import vllm_start
from posttrain.rollout.colocated import ColocatedClient
from posttrain.rollout.make_engine import make_engine

sys.path.append(str(Path(__file__).parent))
import shared_ranks

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_tensor_parallel_gpu.py is for GPUs"),
]


def start(folder: Path, *kinds: str, **settings: Any) -> list[subprocess.Popen[bytes]]:
    """Start two ranks that run `shared_ranks.py`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, shared_ranks.__file__, str(folder), ",".join(kinds), json.dumps(settings)]
    environments = [{**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [subprocess.Popen(command, env=one) for one in environments]


@pytest.fixture
def folder(loaded: LoadedModel, tmp_path: Path) -> Iterator[Path]:
    """A folder with a model; asserts afterwards that no shared memory of vLLM remains on the machine."""
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    before = set(Path("/dev/shm").iterdir())
    yield tmp_path
    assert [path for path in set(Path("/dev/shm").iterdir()) - before if "vllm" in path.name] == []


def test_two_ranks_sharing_an_engine_equal_one_process(folder: Path) -> None:
    """The same tokens for the same seeds, before and after two syncs, for full weights and for an adapter."""
    ranks = start(folder, "full", "lora")
    assert [process.wait(1500) for process in ranks] == [0, 0]
    for kind in ("full", "lora"):
        found = [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
        for one in found:
            assert max(one["gaps"]) < 1e-4 < 0.05 < min(one["stale"]), (kind, one["gaps"], one["stale"])
            versions = {version for completion in one["cut"] for version in completion}
            assert versions <= {shared_ranks.SYNCS, shared_ranks.SYNCS + 1}
            assert all(completion == sorted(completion) for completion in one["cut"])
        rollouts = sorted(row for one in found for row in one["rollouts"])
        assert len(rollouts) == 3 * len(shared_ranks.TEXTS) * (shared_ranks.SYNCS + 1)
        if kind == "full":
            check_equal(rollouts, alone(folder, kind))


def alone(folder: Path, kind: str) -> list[Any]:
    """Run the same with one process and its own engine."""
    loaded = shared_ranks.load(folder / "model", kind)
    engine = make_engine(shared_ranks.section_of(kind), loaded, scratch=folder / "alone", max_len=shared_ranks.WINDOW)
    try:
        return sorted(shared_ranks.sample_across_syncs(engine, loaded, range(len(shared_ranks.TEXTS)))["rollouts"])
    finally:
        engine.close()


def check_equal(rollouts: list[Any], expected: list[Any]) -> None:
    """Check that tokens and log-probs are equal, except in one of a hundred rollouts, where a sample may fall between
    two roundings."""
    same = [(a, b) for a, b in zip(rollouts, expected, strict=True) if a[:3] == b[:3]]
    assert len(same) >= 0.98 * len(expected)
    assert max(abs(x - y) for a, b in same for x, y in zip(a[3], b[3], strict=True)) < 1e-3


def test_killed_worker_ends_both_ranks(folder: Path) -> None:
    """kill -9 of the second worker while both ranks sample: each rank raises soon."""
    ranks = start(folder, "killed")
    try:
        codes = [process.wait(900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0]
    for rank in range(2):
        found = json.loads((folder / f"killed-{rank}.json").read_text())
        assert found["error"].startswith("vLLM's worker process VllmWorker-1") and found["took_s"] < 60


FAILING = """
import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from posttrain.rollout.worker import Extension

def load_model(self, **_):
    if self.rank == 1:
        raise ValueError("the weights of the second worker are missing")
    torch.distributed.barrier()

CPUWorker.load_model = load_model
"""


def test_error_of_a_worker_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker loses its connection, and the engine core reports only that a worker has failed."""
    (folder / "failing_extension.py").write_text(FAILING)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(vllm_start, "EXTENSION", "failing_extension.Extension")
    (folder / "model" / vllm_start.READY_FILE).touch()
    spec = vllm_start.EngineSpec(Vllm(tensor_parallel=2, enforce_eager=True), torch.float32, 64, None, (1,))
    with pytest.raises(EngineError, match="did not start: ValueError: the weights of the second worker are missing"):
        ColocatedClient.start(spec, folder / "model", folder / "engine.log")
    assert "WorkerProc initialization failed" in (folder / "engine.log").read_text()
