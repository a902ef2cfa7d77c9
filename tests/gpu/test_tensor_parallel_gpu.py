"""A server whose vLLM is divided among two GPUs: weights, adapters, log-probs, and a sync in the middle of a call.

    pytest tests/gpu/test_tensor_parallel_gpu.py

Both GPUs serve, and the small trainer shares the first: `server.devices` refuses that, a server at a url does not.
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
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.batch import Prompt, Rollout
from posttrain.models import tiny
from posttrain.models.load import LoadedModel
from posttrain.recipe.rollout_sections import EngineSection, Sampling
from posttrain.rollout import local_server
from posttrain.rollout.engine import make_engine
from posttrain.run.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def model_of(lora: bool) -> LoadedModel:
    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).to("cuda", torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return LoadedModel(model.eval(), tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id, "test")


def disturb(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_two_gpus_hold_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    monkeypatch.setattr(local_server, "not_training", lambda number: number)
    loaded = model_of(lora)
    server = {"devices": [0, 1]}
    values = {"tensor_parallel": 2, "server": server, "gpu_memory": 0.2, "enforce_eager": True}
    section = EngineSection.model_validate({"engine": "vllm", "vllm": values})
    engine: Any = make_engine(section, loaded, scratch=tmp_path, max_len=3000)
    try:
        disturb(loaded.model)
        stale = engine.probe(loaded.model)
        engine.sync(loaded.model, 1)
        print(f"\nprobe before {stale:.4f}, after {engine.gap:.4f}; {engine.route}")
        assert engine.gap < 0.1 and engine.gap < stale
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
        assert len(found) == 32 and {v for r in found for v in r.versions} <= {1, 2}
        for r in found[:4]:
            row = torch.tensor([r.prompt.ids + r.ids], device="cuda")
            with torch.no_grad():
                logp = loaded.model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
            mine = logp.gather(-1, row[0, 1:, None]).squeeze(-1)[len(ids) - 1 :].cpu()
            new = torch.tensor(r.versions) == 2
            if new.any():
                assert float((mine - torch.tensor(r.logps))[new].abs().mean()) < 0.1
    finally:
        engine.close()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_three_steps(tmp_path: Path, lora: bool) -> None:
    """`posttrain rl` with `posttrain serve` on both GPUs. Every sync is probed: a stale engine would end the run."""
    loaded = model_of(lora=False)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "posttrain"]
    with (tmp_path / "serve.log").open("wb") as log:
        serving = subprocess.Popen([*command, "serve", "--port", str(port)], stdout=log, stderr=log)
    try:
        done = subprocess.run(
            [
                *(*command, "rl", "debug/rl", f"model.path={tmp_path / 'model'}", "rollout.engine=vllm"),
                *(f"rollout.vllm.server.urls=[http://127.0.0.1:{port}]", "rollout.vllm.tensor_parallel=2"),
                *("rollout.vllm.gpu_memory=0.2", "rollout.vllm.enforce_eager=true", "run.steps=3"),
                *(["model.lora.rank=4"] if lora else []),
                *("--output", str(tmp_path / "run"), "--json"),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=tmp_path, timeout=240,
        )  # fmt: skip
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(30)
    assert done.returncode == 0, done.stderr[-3000:] + (tmp_path / "serve.log").read_text()[-3000:]
    assert json.loads(done.stdout)["steps"] == 3
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3 and all(row["mismatch/mean"] < 0.1 for row in rows)
    assert ("files of this machine" if lora else "shared memory") in done.stderr
