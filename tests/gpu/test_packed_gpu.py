"""Packed attention on a CUDA device: the variable-length kernel is what runs under autocast, and it equals padding."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from posttrain.models.precision import keep_master_weights
from posttrain.train import attention
from posttrain.train.logprobs import Sequences, completion_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_packed_equals_padded_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).cuda().bfloat16()
    assert keep_master_weights(model) == torch.bfloat16
    draw = torch.Generator().manual_seed(1)
    rows = tuple(tuple(torch.randint(0, 512, (n,), generator=draw).tolist()) for n in (40, 7, 100, 64))
    sequences = Sequences(rows, (5, 3, 20, 63))
    calls = 0
    kernel = attention._varlen()

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return kernel(*args, **kwargs)

    def passed(packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logp, _ = completion_logprobs(model, sequences, 80, packed=packed)
        logp.sum().backward()
        return logp.detach(), model.model.embed_tokens.weight.grad.clone()

    padded, gradient = passed(packed=False)
    attention._causal(None)  # reads the kernel's signature before it is replaced
    monkeypatch.setattr(attention, "_varlen", lambda: counted)
    assert attention.use_packed_attention(model)
    packed, packed_gradient = passed(packed=True)
    assert calls == config.num_hidden_layers
    assert (packed - padded).abs().max() < 0.1
    assert torch.nn.functional.cosine_similarity(packed_gradient.flatten(), gradient.flatten(), dim=0) > 0.999
