"""GPU memory that is released between uses and restored unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.models import tiny
from posttrain.models.load import LoadedModel
from posttrain.recipe.training_sections import Optim
from posttrain.train import optim
from posttrain.train.reference import reference_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_offloaded_reference_is_on_the_gpu_only_during_use() -> None:
    model: Any = tiny.build(0)[0].cuda()
    ids = torch.arange(12, device="cuda")[None]
    expected = model(ids).logits
    reference = reference_policy(LoadedModel(model, None, (1,), 0, "test"), offload=True)
    for _ in range(2):
        with reference() as frozen:
            assert {t.device.type for t in [*frozen.parameters(), *frozen.buffers()]} == {"cuda"}
            assert torch.allclose(frozen(ids).logits, expected, atol=1e-5)
        assert {t.device.type for t in [*frozen.parameters(), *frozen.buffers()]} == {"cpu"}


def test_paged_moments_stay_paged_after_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    weight = nn.Linear(512, 512, bias=False, device="cuda")
    section = Optim(use="paged_adamw_8bit")

    def step(optimizer: Any) -> torch.Tensor:
        weight.weight.grad = torch.ones_like(weight.weight)
        optimizer.step()
        return weight.weight.detach().clone()

    first = optim.build(weight, section)
    step(first)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    before = weight.weight.detach().clone()
    expected = step(first)
    again: Any = optim.build(weight, section)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", map_location="cpu", weights_only=True))
    with torch.no_grad():
        weight.weight.copy_(before)
    assert torch.equal(step(again), expected)
    assert all(s["state1"].is_paged and s["state2"].is_paged for s in again.state.values())


PASSES = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from posttrain.train import machine_checks
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs

device = torch.device("cuda")
if sys.argv[1] == "growing":
    assert machine_checks.use_expandable_segments(device)
config = Qwen2Config(hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
                     intermediate_size=4096, vocab_size=8192, max_position_embeddings=4096, dtype="bfloat16")
model = Qwen2ForCausalLM(config).to(device, torch.bfloat16)
use_packed_attention(model)
draw = torch.Generator().manual_seed(0)
for _ in range(30):
    lengths = torch.randint(500, 4000, (int(torch.randint(2, 9, (), generator=draw)),), generator=draw).tolist()
    rows = tuple(tuple(torch.randint(0, 8192, (n,), generator=draw).tolist()) for n in lengths)
    logp, _ = completion_logprobs(model, Sequences(rows, (8,) * len(rows)), max(lengths), packed=True)
    logp.sum().backward()
    model.zero_grad(set_to_none=True)
    del logp
print(torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated())
"""


def test_expandable_segments_reduce_fragmentation(tmp_path: Path) -> None:
    """Lines of 1,000 to 30,000 tokens in random order; the default allocator reserves more, so the option is useful."""
    script = tmp_path / "passes.py"
    script.write_text(PASSES)
    ratio = {}
    for how in ("growing", "default"):
        done = subprocess.run([sys.executable, str(script), how], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        ratio[how] = float(done.stdout.split()[-1])
    assert ratio["growing"] < 1.1
    assert ratio["growing"] < ratio["default"]


def test_shared_buffers_are_outside_expandable_segments(tmp_path: Path) -> None:
    """`weight_transfer.Staging` in a process with expandable segments: another process maps its buffer and reads it."""
    pytest.importorskip("vllm")
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


SHARED = """
import torch, multiprocessing
from posttrain.rollout.weight_transfer import Staging, pack
from posttrain.train import machine_checks

def read(described, queue):
    from posttrain.rollout import worker
    queue.put([(name, tensor.float().sum().item()) for name, tensor in worker.read_gpu(**described)])

if __name__ == "__main__":
    device = torch.device("cuda")
    assert machine_checks.use_expandable_segments(device)
    kept = [torch.full((1 << 20,), float(n), device=device) for n in range(8)]
    del kept[::2]  # free blocks of segments that grow
    staging = Staging(1 << 22, device)
    described = pack([("a", torch.ones(100, 10, device=device))], torch.bfloat16, staging.buffer)
    described |= staging.export_handle()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=read, args=(described, queue))
    process.start()
    assert queue.get(timeout=120) == [("a", 1000.0)]
    process.join()
"""
