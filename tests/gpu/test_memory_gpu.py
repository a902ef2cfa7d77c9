"""What leaves the GPU's memory between uses, and comes back as it was."""

from __future__ import annotations

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


def test_an_offloaded_reference_is_on_the_gpu_only_while_it_is_read() -> None:
    model: Any = tiny.build(0)[0].cuda()
    ids = torch.arange(12, device="cuda")[None]
    expected = model(ids).logits
    reference = reference_policy(LoadedModel(model, None, (1,), 0, "test"), offload=True)
    for _ in range(2):
        with reference() as frozen:
            assert {t.device.type for t in [*frozen.parameters(), *frozen.buffers()]} == {"cuda"}
            assert torch.allclose(frozen(ids).logits, expected, atol=1e-5)
        assert {t.device.type for t in [*frozen.parameters(), *frozen.buffers()]} == {"cpu"}


def test_paged_moments_are_paged_again_after_a_checkpoint(tmp_path: Path) -> None:
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
