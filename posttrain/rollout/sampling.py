"""From logits to tokens. Shapes: R rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.recipe.rollout_sections import Sampling


def uniforms(rows: int, length: int, seed: int) -> Tensor:
    """[rows, length] random numbers in [0, 1), drawn on the CPU from their own generator.

    One number a row and position decides a token, so that what a row becomes does not depend on the batch it is decoded
    in or on when its neighbours finish, and global random state is neither read nor moved.
    """
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(seed))


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [R,V], u [R] in [0,1) -> tokens [R], log-probs [R] (fp32, before top-k and top-p)."""
    scaled = logits.float()
    if sampling.temperature > 0:
        scaled = scaled / sampling.temperature
    logp = scaled.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logp.argmax(-1)
    else:
        tokens = inverse_cdf(truncate(logp.exp(), top_k=sampling.top_k, top_p=sampling.top_p), u)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds u * total: weights [R,V] >= 0, u [R] in [0,1) -> [R].

    Never picks a token of weight 0: the target stays below the total also where rounding would reach it.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None].to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN weights give the last token here; `decode` reports them
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def truncate(probs: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """probs [R,V] with everything outside the k likeliest (0 = all) and outside the nucleus of mass p set to 0.

    The nucleus is taken of what top-k left. It is the smallest set of likeliest tokens whose mass reaches p, so one
    token at least always stays. Ties at the k-th place all stay.
    """
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens
        outside = before >= top_p * ordered.sum(-1, keepdim=True)
        outside[:, 0] = False
        probs = probs.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return probs
