"""Context parallelism of a packed line: what each rank attends to, and that all ranks together equal one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.batch import concatenate_ranges
from posttrain.errors import ModelError
from posttrain.models import tiny
from posttrain.train import attention, sft
from posttrain.train.attention import packed_attention
from posttrain.train.context_split import part_of_line
from posttrain.train.packed_line import Packed

CPU = torch.device("cpu")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed, window: int | None
) -> torch.Tensor:
    module = torch.nn.Module()
    return packed_attention(module, query, key, value, None, packed=packed, sliding_window=window)[0]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("lengths", [[13], [1, 7, 2, 9], [4, 4, 4]])
def test_attention_of_the_parts_equals_the_whole_line(
    lengths: list[int], count: int, shared: bool, window: int | None
) -> None:
    """Outputs and gradients of queries, keys and values. shared: later rows also see the first token of the first
    row."""
    torch.manual_seed(0)
    total = sum(lengths)
    inputs = [torch.randn(1, heads, total, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    line = Packed.of(lengths, CPU)
    if shared:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        spans = [span for n, at in enumerate(starts) for span in ([(0, 1)] if n else []) + [(at, lengths[n])]]
        sources = concatenate_ranges([size for _, size in spans], [at for at, _ in spans])
        line = Packed.with_shared_keys(lengths, [n + (i > 0) for i, n in enumerate(lengths)], sources, CPU)
    whole = attend(*inputs, line, window)
    weights = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weights).sum(), inputs)

    parts = [part_of_line(line, rank, count) for rank in range(count)]
    sizes = {len(own) for own, _, _ in parts}
    assert len(sizes) == 1 and sizes.pop() == 2 * -(-total // (2 * count)), "each has as many tokens"
    assert all(torch.equal(order, parts[0][2]) for _, _, order in parts)
    key, value = (torch.cat([x[:, :, own] for own, _, _ in parts], 2) for x in inputs[1:])  # as they are gathered
    outs = [attend(inputs[0][:, :, own], key, value, part, window) for own, part, _ in parts]
    found = torch.cat(outs, 1)[:, parts[0][2]]
    assert torch.allclose(found, whole, atol=1e-12)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(grads, expected, strict=True))


def test_unpackable_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build()[0]
    model.config._attn_implementation = "eager"
    assert not attention.enable_packing(model, CPU)
    for module in (attention, sft):
        monkeypatch.setattr(module, "is_split", lambda _: True)
    loaded: Any = SimpleNamespace(model=model)
    for enable in (lambda: attention.enable_packing(model, CPU), lambda: sft.make_packing_collator(loaded)):
        with pytest.raises(ModelError, match=r"model\.parallel\.context divides packed rows"):
            enable()


def test_causal_attention_work_is_balanced() -> None:
    """Counts query-key pairs of one row of 4000 tokens."""
    line = Packed.of([4000], CPU)
    work = []
    for rank in range(4):
        _, part, _ = part_of_line(line, rank, 4)
        assert part.keys is not None
        work.append(sum(n * (k - n) + n * (n + 1) / 2 for n, k in zip(part.lengths, part.keys.lengths, strict=True)))
    assert sum(work) == 4000 * 4001 / 2 and max(work) < 1.01 * min(work)
