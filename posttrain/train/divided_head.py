"""Log-probs from a vocabulary-parallel output head.

Each rank holds the rows of the head, and the logits, of its shard of the vocabulary. A log-softmax over the whole
vocabulary needs a maximum and a few sums per position. Only these are all-reduced, not the logits; all ranks get the
same log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.train.collectives import reduce, sum_gradients_of, sum_parts

Chunks = Callable[..., Any]


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of the vocabulary, from token `first` on.

    logits: computes the logits of these tokens from hidden states; backward all-reduces the gradient of the hidden
    states over `group`.
    """

    logits: Callable[..., Tensor]
    group: Any
    first: int


def log_softmax(logits: Tensor, own: VocabularyShard | None) -> Tensor:
    """Return the log-probs of this rank's tokens, normalized over the whole vocabulary."""
    if own is None:
        return logits.log_softmax(-1)
    largest = reduce(logits.max(-1, keepdim=True).values, own.group, dist.ReduceOp.MAX)
    total = sum_parts((logits - largest).exp().sum(-1, keepdim=True), own.group)
    return logits - sum_gradients_of(largest + total.log(), own.group)  # each rank subtracts it from different logits


def sum_over_vocabulary(values: Tensor, own: VocabularyShard | None) -> Tensor:
    """Sum over the vocabulary, the last dimension."""
    total = values.sum(-1)
    return total if own is None else sum_parts(total, own.group)


def gather_tokens(values: Tensor, tokens: Tensor, own: VocabularyShard | None) -> Tensor:
    """Return the values [M] of `tokens` [M] from `values` [M,V]."""
    if own is None:
        return values.gather(-1, tokens[:, None])[:, 0]
    return sum_parts(_gather_own_tokens(values, tokens, own.first), own.group)


def topk(values: Tensor, count: int, own: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values [M,K] in descending order, and their tokens; without gradient."""
    found = values.detach().topk(min(count, values.shape[-1]))
    if own is None:
        return found.values, found.indices
    ranks = dist.get_world_size(own.group)
    gathered = [[torch.empty_like(x) for _ in range(ranks)] for x in found]
    for parts, mine in zip(gathered, (found.values, found.indices + own.first), strict=True):
        dist.all_gather(parts, mine.contiguous(), group=own.group)
    values, tokens = (torch.cat(parts, -1) for parts in gathered)
    best = values.topk(min(count, values.shape[-1]))
    return best.values, tokens.gather(-1, best.indices)


def _gather_own_tokens(values: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Return the values [M] of the `tokens` [M] that are in this rank's shard of the vocabulary; 0 for other tokens."""
    index = tokens - first
    is_own = (index >= 0) & (index < values.shape[-1])
    return values.gather(-1, index.where(is_own, 0)[:, None])[:, 0].where(is_own, 0.0)


class ShardedTokenScores(torch.autograd.Function):
    """Compute (logp, entropy) [M] in float32 of targets [M] from a sharded head.

    hidden: [M,H]. weight: this rank's rows [V/n,H] of the head. Logits are computed in the dtype of hidden and
    recomputed in the backward pass; the gradient of the weight is summed in float32. chunks: yields hidden states,
    targets and scales a few tokens at a time. scaled: logits / scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float | Tensor,
        own: VocabularyShard,
        chunks: Chunks,
        scaled: Chunks,
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, totals, w = [], [], [], weight.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for h, t, s in chunks(hidden, targets, scale):
                logits = scaled(h @ w.T, s).float()
                largest = reduce(logits.max(-1).values, own.group, dist.ReduceOp.MAX)
                weights = (logits - largest[:, None]).exp()
                means = torch.linalg.vecdot(weights, logits)
                chosen = _gather_own_tokens(logits, t, own.first)
                total, means, chosen = reduce(torch.stack([weights.sum(-1), means, chosen]), own.group)
                totals.append(largest + total.log())
                logp.append(chosen - totals[-1])
                entropy.append(totals[-1] - means / total)
        ctx.save_for_backward(
            hidden, weight, targets, torch.cat(totals), *([scale] if isinstance(scale, Tensor) else [])
        )
        ctx.scale, ctx.own = None if isinstance(scale, Tensor) else scale, own
        ctx.chunks, ctx.scaled = chunks, scaled
        found = torch.cat(entropy)
        ctx.mark_non_differentiable(found)
        return torch.cat(logp), found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, totals, *scales = ctx.saved_tensors
        scale = scales[0] if scales else ctx.scale
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        w, at = weight.to(hidden.dtype), 0
        for h, t, s in ctx.chunks(hidden, targets, scale):
            rows = slice(at, at + len(h))
            g = (grad[rows].float() / (s[:, 0] if isinstance(s, Tensor) else s))[:, None]
            to_logits = (ctx.scaled(h @ w.T, s).float() - totals[rows, None]).exp_().mul_(-g)
            index = t - ctx.own.first
            is_own = (index >= 0) & (index < len(w))
            to_logits.scatter_add_(-1, index.where(is_own, 0)[:, None], g * is_own[:, None])
            to_logits = to_logits.to(w.dtype)
            if to_hidden is not None:
                to_hidden[rows] = to_logits @ w
            if to_weight is not None:
                to_weight += to_logits.T @ h
            at += len(h)
        summed = None if to_hidden is None else reduce(to_hidden, ctx.own.group)
        return summed, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None, None
