"""The RL loop with the vLLM engine, on a CPU as on a GPU: weights reach the engine, and its log-probs match the
trainer's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.models import tiny
from posttrain.run.metrics import read_metrics

from .families import save_family

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


EAGER = ("rollout.vllm.enforce_eager=true",)
SERVER = (*EAGER, "rollout.vllm.server.devices=[1]", "model.lora.rank=4")
EVALUATED = ("eval={every: 1, n: 2, max_new_tokens: 20, data: {source: ../quickstart_data.py:problems, size: 5}}",)
PLACES = {
    "here": (*EAGER, *EVALUATED),
    "compiled": EVALUATED,
    "server": SERVER,
    "adding server": (*SERVER, "rollout.vllm.merge_adapter=true"),
}
SLOW = {
    "compiled": pytest.mark.slow(reason="torch.compile; `here` is the same run without"),
    "adding server": pytest.mark.slow(reason="test_vllm.py sends such sums, and `server` is the same run without them"),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model directory with a head size supported by vLLM on a CPU (32)."""
    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize("place", [pytest.param(place, marks=SLOW.get(place, ())) for place in PLACES])
def test_three_steps_with_probed_syncs(small: Path, place: str) -> None:
    """The engine probes every sync: stale weights would end the run."""
    output = small.parent / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "posttrain", "rl", "debug/rl", f"model.path={small}", "rollout.engine=vllm"),
            *("optim.lr=1e-2", "run.steps=3", *PLACES[place], "--output", str(output), "--json"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=small.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["steps"] == 3
    rows = read_metrics(output)
    steps = [row for row in rows if row["step"]]
    assert all(row["grad_norm"] > 0 for row in steps)
    assert all(row["mismatch/max"] < 1e-3 for row in steps), "float32 on both sides, after large updates"
    if EVALUATED[0] in PLACES[place]:
        assert [row["step"] for row in rows if row["eval/mean_length"] <= 20] == [0, 1, 2, 3]


def test_trees_grow_concurrently(small: Path) -> None:
    """DeepSearch with an engine that takes concurrent requests: paths of a tree share tokens and log-probs, which equal
    the trainer's."""
    output = small.parent / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "posttrain", "rl", "rl/deepsearch_tiny", f"model.path={small}"),
            *("rollout.engine=vllm", *EAGER, "run.steps=2", "run.samples_per_step=16"),
            *("--output", str(output), "--json"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=small.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(row["grad_norm"] > 0 and row["mismatch/max"] < 1e-3 for row in read_metrics(output))
    nodes: dict[tuple[int, int, int], list[int]] = {}
    shared = 0
    for line in (output / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        for node, segment in zip(row["nodes"], row["segments"], strict=True):
            key = (row["step"], row["group"], node["number"])
            shared += key in nodes
            assert nodes.setdefault(key, segment["ids"]) == segment["ids"]
    assert shared > 0


MERGED = ("model.lora.rank=4", "rollout.vllm.merge_adapter=true")


@pytest.mark.parametrize("adapter", [(), MERGED], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_mixture_of_experts_with_vllm(kind: str, adapter: tuple[str, ...], tmp_path: Path) -> None:
    """Experts have other names in checkpoints than in the model, and on a CPU vLLM computes with repacked ones."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    width = {"intermediate_size": 64, "moe_intermediate_size": 64}
    base, output = save_family(kind, tmp_path / kind, **sizes, **width), tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "posttrain", "rl", "debug/rl", f"model.path={base}", "rollout.engine=vllm"),
            *("optim.lr=1e-2", "run.steps=2", "rollout.vllm.enforce_eager=true", *adapter),
            *("--output", str(output), "--json"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(output)
    assert len(rows) == 2 and all(row["grad_norm"] > 0 and row["mismatch/max"] < 1e-2 for row in rows)


def test_unsupported_head_size_raises_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of `tiny` have size 16. vLLM provides the list of supported sizes."""
    if torch.cuda.is_available():
        pytest.skip("vLLM has kernels for them on a GPU")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["rl", "debug/rl", "rollout.engine=vllm", "--output", str(tmp_path / "run")])
    assert done.exit_code == 2, done.stderr[-3000:]
    assert "head size on a CPU: 16" in done.stderr and " 32, 64, " in done.stderr
    assert "starting vLLM" not in done.stderr and not (tmp_path / "run").exists()
