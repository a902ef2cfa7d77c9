"""Packed attention on a CUDA device: autocast runs the variable-length kernel, and results equal padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

from posttrain.models.precision import keep_master_weights
from posttrain.recipe.sections import Model
from posttrain.train import attention
from posttrain.train.collate import Sequences
from posttrain.train.compiled import compile_layers
from posttrain.train.logprobs import completion_logprobs, completion_scores

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def small() -> Any:
    """Return a Qwen2 of four layers with fewer keys than queries: float32 weights, bfloat16 products."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config).cuda().bfloat16()
    assert keep_master_weights(model) == torch.bfloat16
    return model


def test_packed_equals_padded_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    draw = torch.Generator().manual_seed(1)
    rows = tuple(tuple(torch.randint(0, 512, (n,), generator=draw).tolist()) for n in (40, 7, 100, 64))
    sequences = Sequences(rows, (5, 3, 20, 63))
    calls = 0
    kernel = attention.varlen_attn

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
    assert attention.use_packed_attention(model)
    monkeypatch.setattr(attention, "varlen_attn", counted)
    packed, packed_gradient = passed(packed=True)
    assert calls == model.config.num_hidden_layers
    assert (packed - padded).abs().max() < 0.1
    assert torch.nn.functional.cosine_similarity(packed_gradient.flatten(), gradient.flatten(), dim=0) > 0.999


def test_compiled_layer_is_one_graph_with_the_kernel() -> None:
    model = small()
    assert attention.use_packed_attention(model)
    draw = torch.Generator().manual_seed(1)

    def passed(lengths: list[int]) -> torch.Tensor:
        rows = tuple(tuple(torch.randint(0, 512, (n,), generator=draw.manual_seed(n)).tolist()) for n in lengths)
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logp, _ = completion_logprobs(model, Sequences(rows, (2,) * len(rows)), max(lengths) - 2, packed=True)
        logp.sum().backward()
        return torch.cat([logp.detach().flatten(), *(p.grad.flatten() for p in model.parameters())])

    batches = [[40, 7, 100, 64], [33, 90], [5, 6, 7, 8, 9, 150]]
    eager = [passed(lengths) for lengths in batches]
    torch.compiler.reset()
    counters.clear()
    with compile_layers(model, Model(path="tiny", compile=True))():
        found = [passed(lengths) for lengths in batches]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for one, other in zip(found, eager, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999


def test_both_sides_of_a_pair_attend_to_the_shared_prompt() -> None:
    """Pairs in one line: the kernel aligns a few queries with the end of many keys."""
    from trl.trainer.utils import add_fused_lm_head

    from posttrain.train import pair_packing

    model = small()
    add_fused_lm_head(model)
    draw = torch.Generator().manual_seed(1)
    made = [[torch.randint(0, 512, (n,), generator=draw).tolist() for n in row] for row in ((40, 7, 100), (3, 64, 9))]
    pairs = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in made]
    rows = [p["prompt_ids"] + p[side] for side in ("chosen_ids", "rejected_ids") for p in pairs]
    alone = []
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for row, prompt in zip(rows, [p["prompt_ids"] for p in pairs] * 2, strict=True):
            ids = torch.tensor([row], device="cuda")
            logps = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            alone.append(logps.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :].sum())
    assert attention.use_packed_attention(model)
    batch = pair_packing.make_packing_collator(torch.device("cuda"))(pairs)
    batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = pair_packing.summed_logps(model, batch)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.stack(alone), rtol=5e-3, atol=0.5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_shared_prompt_equals_whole_rows_under_autocast() -> None:
    """Fewer queries than keys, in one kernel."""
    model = small()
    assert attention.use_packed_attention(model)
    draw = torch.Generator().manual_seed(1)
    prompt, *ends = (tuple(torch.randint(0, 512, (n,), generator=draw).tolist()) for n in (200, 7, 30, 64, 1))
    sequences = Sequences(tuple((*prompt, *end) for end in ends), (200,) * len(ends))
    found = []
    for share in (False, True):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logp = completion_scores(model, sequences, 64, packed=True, share=share, fill=64)["logp"]
        logp.sum().backward()
        found.append((logp.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.flatten()))
    (whole, wanted), (shared, gradient) = found
    assert (shared - whole).abs().max() < 0.1
    assert torch.nn.functional.cosine_similarity(gradient, wanted, dim=0) > 0.999
