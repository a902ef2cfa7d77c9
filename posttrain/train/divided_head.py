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


def sharded_scores(logits: Tensor, tokens: Tensor, own: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logp of `tokens`, entropy, log of the sum of exp(logits)) [M] of this rank's logits [M,V/n], float32."""
    largest = reduce(logits.max(-1).values, own.group, dist.ReduceOp.MAX)
    weights = (logits - largest[:, None]).exp()
    means = torch.linalg.vecdot(weights, logits)
    chosen = _gather_own_tokens(logits, tokens, own.first)
    total, means, chosen = reduce(torch.stack([weights.sum(-1), means, chosen]), own.group)
    log_total = largest + total.log()
    return chosen - log_total, log_total - means / total, log_total


def sharded_gradient(logits: Tensor, log_total: Tensor, tokens: Tensor, grad: Tensor, own: VocabularyShard) -> Tensor:
    """Return the gradient of this rank's logits [M,V/n], given that of the log-probs of `tokens`, grad [M,1]."""
    to_logits = (logits - log_total[:, None]).exp_().mul_(-grad)
    index = tokens - own.first
    is_own = (index >= 0) & (index < logits.shape[-1])
    return to_logits.scatter_add_(-1, index.where(is_own, 0)[:, None], grad * is_own[:, None])
