"""Merge rules that need no differences from a base: spherical interpolation, checkpoint averages and soups.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.merge.blocks import iterate_blocks, map_blocks
from posttrain.merge.rules import to_sum_dtype
from posttrain.registry import register


@register("merge", "slerp", needs=("two_models",))
def slerp(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    t: float = 0.5,
    dot_threshold: float = 0.9995,
    eps: float = 1e-8,
) -> Tensor:
    """Interpolate spherically from the first model (t = 0) to the second (t = 1), tensor by tensor.

    This is mergekit's `slerp`. `base_model`, if given, is the first of the two. The interpolation is linear if the
    tensors are nearly parallel (|cosine| > dot_threshold) or one has a norm of at most eps; mergekit treats a tensor of
    zeros as orthogonal to everything. Raises MergeError unless there are exactly two models.
    """
    del base, weights
    if len(models) != 2:
        raise MergeError(f"slerp is between exactly two models, not {len(models)}")
    first, second = slerp_coefficients(*models, t=t, dot_threshold=dot_threshold, eps=eps)
    dtype = torch.float64 if models[0].dtype == torch.float64 else torch.float32
    return map_blocks(lambda x, y: first * to_sum_dtype(x) + second * to_sum_dtype(y), *models, dtype=dtype)


def slerp_coefficients(x: Tensor, y: Tensor, *, t: float, dot_threshold: float, eps: float) -> tuple[float, float]:
    """Return the coefficients of the two tensors in their spherical interpolation. x and y have the same shape."""
    squares_x = squares_y = product = 0.0
    for a, b in ((to_sum_dtype(a), to_sum_dtype(b)) for a, b in iterate_blocks(x, y)):
        squares_x, squares_y = squares_x + float(torch.dot(a, a)), squares_y + float(torch.dot(b, b))
        product += float(torch.dot(a, b))
    norms = math.sqrt(squares_x), math.sqrt(squares_y)
    cosine = product / (norms[0] * norms[1]) if min(norms) > eps else 1.0
    if abs(cosine) > dot_threshold:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


@register("merge", "checkpoint_average", needs=("by_entry",))
def checkpoint_average(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    mode: Literal["last_k", "ema"] = "last_k",
    k: int | None = None,
    decay: float = 0.99,
    bias_correction: bool = False,
) -> Tensor:
    """Average the checkpoints of one run, oldest first: the mean of the last k, or an exponential average.

    `last_k`: k None or larger than the number of checkpoints averages all of them. `ema`: e_0 = c_0, e_i = decay
    e_{i-1} + (1 - decay) c_i; with `bias_correction` the average starts at 0 and is divided by 1 - decay^n. A single
    checkpoint is returned unchanged.
    """
    del base, weights
    shares = checkpoint_coefficients(len(models), mode=mode, k=k, decay=decay, bias_correction=bias_correction)
    used = [(share, to_sum_dtype(tensor)) for share, tensor in zip(shares, models, strict=True) if share]
    total = used[0][0] * used[0][1]
    for share, tensor in used[1:]:
        total += share * tensor
    return total


def checkpoint_coefficients(
    count: int, *, mode: Literal["last_k", "ema"], k: int | None, decay: float, bias_correction: bool
) -> list[float]:
    """Return the coefficient of each of `count` checkpoints, oldest first, in the average; they sum to 1.

    Raises MergeError for a decay outside [0, 1) or a k below 1.
    """
    if mode == "last_k":
        if k is not None and k < 1:
            raise MergeError(f"k {k}: at least one checkpoint must be averaged")
        last = count if k is None else min(k, count)
        return [0.0] * (count - last) + [1 / last] * last
    if not 0 <= decay < 1:
        raise MergeError(f"decay {decay:g} is not in [0, 1)")
    ages = range(count - 1, -1, -1)
    if bias_correction:
        return [(1 - decay) * decay**age / (1 - decay**count) for age in ages]
    return [decay**age * (1 if age == count - 1 else 1 - decay) for age in ages]


def greedy_soup(scores: Sequence[float], score_of: Callable[[tuple[int, ...]], float]) -> list[int]:
    """Return the indices of the models of a greedy soup, in the order in which they were added.

    Starts with the best model (ties: lowest index). Each further model, best first, is added if `score_of(sorted
    indices of the soup with it)` is at least the current score, which it then replaces. The soup never scores below the
    best single model.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept, best = order[:1], scores[order[0]]
    for candidate in order[1:]:
        score = score_of(tuple(sorted([*kept, candidate])))
        if score >= best:
            kept, best = [*kept, candidate], score
    return kept
