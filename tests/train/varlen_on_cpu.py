"""CPU implementation of torch's variable-length attention operator, to inspect graphs that contain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("posttrain_tests::varlen", mutates_args={})
def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, seen: Tensor, longest: int) -> Tensor:
    """Compute causal attention of concatenated rows, [tokens,heads,dim]; the last keys of a row belong to its
    queries. seen: the end offset of each row's keys.
    """
    assert longest == int(ends.diff().max())
    rows = zip(*split((q, k, v), (ends, seen, seen)), strict=True)
    return torch.cat([(shares(a, b) @ c.transpose(0, 1)).transpose(0, 1) for a, b, c in rows]).to(q.dtype)


def split(tensors: Sequence[Tensor], ends: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [x.float().split(end.diff().tolist()) for x, end in zip(tensors, ends, strict=True)]


def shares(q: Tensor, k: Tensor) -> Tensor:
    """Return the attention weights [heads,L,S] of the tokens of one row [L,heads,dim] over its visible tokens
    [S,heads,dim].
    """
    products = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    near = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return products.masked_fill(~near, float("-inf")).softmax(-1)


@torch.library.custom_op("posttrain_tests::varlen_backward", mutates_args={})
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, seen: Tensor) -> list[Tensor]:
    parts = []
    for a, b, c, g in zip(*split((q, k, v, grad), (ends, seen, seen, ends)), strict=True):
        share, to_share = shares(a, b), torch.einsum("qhd,khd->hqk", g, c)
        to_products = share * (to_share - (share * to_share).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        sums = ("hqk,khd->qhd", to_products, b), ("hqk,qhd->khd", to_products, a), ("hqk,qhd->khd", share, g)
        parts.append([torch.einsum(*one) for one in sums])
    return [torch.cat(one).to(q.dtype) for one in zip(*parts, strict=True)]


varlen.register_fake(lambda q, *_: torch.empty_like(q))
varlen_backward.register_fake(lambda _, q, k, v, *__: [torch.empty_like(x) for x in (q, k, v)])
varlen.register_autograd(
    lambda ctx, grad: (*varlen_backward(grad.contiguous(), *ctx.saved_tensors), None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:5]),  # noqa: ARG005  torch passes names
)


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, seen: Tensor, longest: int, *_: int, **__: Any
) -> Tensor:
    """Same signature as `torch.nn.attention.varlen.varlen_attn`."""
    repeats = q.shape[1] // k.shape[1]
    return varlen(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), ends, seen, longest)
