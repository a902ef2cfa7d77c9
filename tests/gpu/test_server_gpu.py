"""Servers on other GPUs than the trainer's: weights by NCCL, adapters, log-probs, and a sync during generation.

pytest tests/gpu/test_server_gpu.py

On two GPUs one trains and one serves; with three, two serve together.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models import tiny
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.make_engine import make_engine
from posttrain.run.metrics import read_metrics
from tests.gpu.failure_report import failure_report
from tests.gpu.small_llama import small_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
KINDS = pytest.mark.parametrize("kind", ["full", "lora", "merged"])
SERVING = pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices"))],
)


def model_of(lora: bool) -> LoadedModel:
    tokenizer = tiny.build_tokenizer()
    model = small_llama(tokenizer).to("cuda")
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return LoadedModel(model.eval(), tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id, "test")


def disturb(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)


def engine_of(loaded: LoadedModel, scratch: Path, size: int, devices: list[int], *, merge: bool) -> Any:
    values = {"tensor_parallel": size, "server": {"devices": devices}, "gpu_memory": 0.2, "enforce_eager": True}
    section = EngineSection.model_validate({"engine": "vllm", "vllm": {**values, "merge_adapter": merge}})
    return make_engine(section, loaded, scratch=scratch, max_len=3000)


@SERVING
@KINDS
def test_servers_have_the_trainers_weights(tmp_path: Path, size: int, kind: str) -> None:
    """Before a sync, after it, and after a sync during generation; a sync leaves no memory allocated on the trainer's
    GPU."""
    loaded = model_of(kind != "full")
    engine = engine_of(loaded, tmp_path, size, list(range(1, 1 + size)), merge=kind == "merged")
    try:
        disturb(loaded.model)
        stale = engine.probe(loaded.model)
        torch.cuda.synchronize()
        before, began = torch.cuda.memory_allocated(), time.monotonic()
        engine.sync(loaded.model, 1)
        took = time.monotonic() - began
        print(f"\nprobe before {stale:.4f}, after {engine.gap:.4f}; a sync takes {took:.3f} s")
        assert engine.gap < 0.1 and engine.gap < stale
        assert torch.cuda.memory_allocated() == before, "a sync keeps memory"
        ids = tuple(loaded.tokenizer.encode("12+30=", add_special_tokens=False))
        prompts = [Prompt(f"p{i}", {}, "12+30=", ids) for i in range(8)]
        sampling = Sampling(max_new_tokens=2900)
        found: list[Rollout] = []
        drawing = threading.Thread(target=lambda: found.extend(engine.generate(prompts, 4, sampling, seed=1)))
        drawing.start()
        time.sleep(1.0)
        disturb(loaded.model)
        engine.sync(loaded.model, 2)
        drawing.join(60)
        assert len(found) == 32 and {v for r in found for v in r.versions or (r.version,)} <= {1, 2}
        for r in found[:4]:
            row = torch.tensor([r.prompt.ids + r.ids], device="cuda")
            with torch.no_grad():
                logp = loaded.model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
            mine = logp.gather(-1, row[0, 1:, None]).squeeze(-1)[len(ids) - 1 :].cpu()
            new = torch.tensor(r.versions or (r.version,) * len(r.ids)) == 2
            if new.any():
                assert float((mine - torch.tensor(r.logps))[new].abs().mean()) < 0.1
    finally:
        engine.close()


def test_two_engines_on_one_gpu_have_separate_groups(tmp_path: Path) -> None:
    """NCCL does not accept the same GPU twice in one group."""
    loaded = model_of(lora=False)
    engine = engine_of(loaded, tmp_path, 1, [1, 1], merge=False)
    try:
        disturb(loaded.model)
        engine.sync(loaded.model, 1)
        assert engine.gap < 0.1 and len(engine.clients) == 2
    finally:
        engine.close()


def test_killed_server_does_not_block_the_trainer(tmp_path: Path) -> None:
    """kill -9 while it receives weights: the sync ends with an error, and the trainer's GPU still works."""
    loaded = model_of(lora=False)
    engine = engine_of(loaded, tmp_path, 1, [1], merge=False)
    try:
        process = engine.clients[0].process.process
        transfer = engine.clients[0].transfer

        async def killing(call: str, info: Any = None) -> None:
            if call == "update_weights":
                os.killpg(process.pid, signal.SIGKILL)
            await transfer(call, info)

        engine.clients[0].transfer = killing
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"killed by SIGKILL(.|\n)*--resume"):
            engine.sync(loaded.model, 1)
        assert time.monotonic() - began < 30
        assert float(torch.ones(8, device="cuda").sum()) == 8.0
        torch.cuda.synchronize()
    finally:
        engine.close()


@KINDS
def test_rl_run_with_a_server_takes_three_steps(tmp_path: Path, kind: str) -> None:
    """`posttrain rl` on GPU 0 with `posttrain serve` on GPU 1. Every sync is probed: stale weights would end the
    run."""
    loaded = model_of(lora=False)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    adapter = [] if kind == "full" else ["model.lora.rank=4"]
    changes = [f"model.path={tmp_path / 'model'}", "rollout.engine=vllm", *adapter, "run.steps=3"]
    changes += [f"rollout.vllm.server.urls=[http://127.0.0.1:{port}]", "rollout.vllm.enforce_eager=true"]
    changes += ["rollout.vllm.gpu_memory=0.2"] + (["rollout.vllm.merge_adapter=true"] if kind == "merged" else [])
    command = [sys.executable, "-m", "posttrain"]
    with (tmp_path / "serve.log").open("wb") as log:
        arguments = ["serve", "debug/rl", *changes, "--port", str(port), "--devices", "1"]
        serving = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
    try:
        done = subprocess.run(
            [*command, "rl", "debug/rl", *changes, "--output", str(tmp_path / "run"), "--json"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"},
            capture_output=True, text=True, cwd=tmp_path, timeout=240,
        )  # fmt: skip
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(30)
    assert done.returncode == 0, failure_report([tmp_path / "serve.log"], done.stderr)
    assert json.loads(done.stdout)["steps"] == 3
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3 and all(row["mismatch/mean"] < 0.1 for row in rows)
