"""Merge rules that select changes entry by entry: by the models that made them, size, or importance.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.merge.deltas import differences, require_base
from posttrain.merge.rules import to_sum_dtype
from posttrain.registry import register

_MIN_DIFFERENCE = 1e-6  # nearswap: lower bound of a difference
_MIN_SUM = 1e-6  # sce: if the mean squares sum to less, all models have equal weight
_PROBABILITY_EPS = 1e-8  # arcee_fusion: added to probabilities before their division


@register("merge", "ram", paper="2601.13572", needs=("base_model", "by_entry"))
def ram(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, eps: float = 1e-5) -> Tensor:
    """Add the differences of RL-trained models; a change that only one model makes is taken in full.

    RL updates change few entries. A model has changed an entry if |difference| > eps (mergekit's `epsilon`). Changed by
    no model: the base; by one: its change; by several: the mean of their changes. eps must exceed the rounding step of
    the stored dtype.
    """
    del weights
    start = require_base(base, "ram")
    total, count = torch.zeros_like(start), torch.zeros_like(start)
    for delta in differences(models, start):
        changed = delta.abs() > eps
        total += torch.where(changed, delta, torch.zeros_like(delta))
        count += changed
    return start + total / count.clamp(min=1)


@register("merge", "ramplus_tl", paper="2601.13572", needs=("base_model",))
def ramplus_tl(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    r: float = 0.1,
    alpha: float = 0.2,
    eps: float = 1e-5,
) -> Tensor:
    """Merge as `ram`, but amplify a model's unshared changes by its proportion of shared changes.

    Changes that only model i makes are multiplied by 1 + r min(rho_i, alpha), with rho_i the number of its shared
    changes over that of its unshared changes, counted per tensor (mergekit's `ramplus_tl`: RAM+ of the paper, tensor by
    tensor).
    """
    del weights
    start = require_base(base, "ramplus_tl")
    count = torch.zeros_like(start)
    for delta in differences(models, start):
        count += delta.abs() > eps
    total = torch.zeros_like(start)
    for delta in differences(models, start):
        changed = delta.abs() > eps
        alone, shared = changed & (count == 1), changed & (count > 1)
        ratio = float(shared.sum()) / max(float(alone.sum()), eps)
        growth = 1 + r * min(max(ratio, 0.0), alpha)
        total += torch.where(alone, growth * delta, 0.0) + torch.where(shared, delta / count.clamp(min=1), 0.0)
    return start + total


@register("merge", "nearswap", needs=("base_model", "one_model", "by_entry"))
def nearswap(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, t: float) -> Tensor:
    """Move the base towards the other model if their difference is small: base + min(1, t / |difference|) difference.

    No entry moves by more than t (mergekit's `nearswap`, from
    https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001, which uses t = 1e-4).
    """
    del weights
    start = require_base(base, "nearswap")
    (model,) = models
    share = (t / (start - to_sum_dtype(model)).abs().clamp(min=_MIN_DIFFERENCE)).clamp(0, 1)
    return share * to_sum_dtype(model) + (1 - share) * start


@register("merge", "sce", paper="2408.07990", needs=("base_model",))
def sce(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, select_topk: float = 1.0) -> Tensor:
    """Select the entries on which models differ most and weight each model by its squared differences.

    This is FuseChat's SCE (select, calculate, erase), as in mergekit's `sce`. Of the entries with nonzero variance over
    the models, the share `select_topk` with the largest variance is kept. The weight of a model is the mean square of
    the kept entries of its difference; weights are equal if these sum to less than 1e-6. The sign of the sum is elected
    entry by entry, as in `ties`, and the average is over the models with that sign.
    """
    del weights
    start = require_base(base, "sce")
    deltas = torch.stack(list(differences(models, start)))
    if select_topk < 1:
        deltas = deltas * _mask_most_varied(deltas, select_topk)
    squares = deltas.square().flatten(1).mean(1)
    total = float(squares.sum())
    shares = squares / total if total >= _MIN_SUM else torch.full_like(squares, 1 / len(squares))
    elected = torch.where(deltas.sum(0) >= 0, 1.0, -1.0).to(deltas.dtype)
    counted = shares.view(-1, *[1] * start.dim()) * (deltas.sign() == elected)
    return start + (deltas * counted).sum(0) / counted.sum(0).clamp(min=_MIN_SUM)


def _mask_most_varied(deltas: Tensor, share: float) -> Tensor:
    """Return 1 for the `share` of the varying entries with the largest variance over the models [M, ...], else 0."""
    spread = deltas.var(dim=0, unbiased=False)
    count = int(int(spread.count_nonzero()) * max(share, 0.0))
    found = torch.zeros_like(spread)
    if count:
        found.view(-1)[spread.reshape(-1).topk(count).indices] = 1
    return found


@register("merge", "arcee_fusion", needs=("base_model", "one_model"))
def arcee_fusion(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float]) -> Tensor:
    """Take the entries of the other model with an importance of at least median + 1.5 IQR.

    Importance of an entry: |difference| times the KL divergence between the softmax of its row (last axis) in the model
    and in the base. Quantiles are entries, the lower of two (mergekit's `arcee_fusion`, which samples 10^6 entries of
    larger tensors to find them; here all entries count).
    """
    del weights
    start = require_base(base, "arcee_fusion")
    (model,) = models
    own = to_sum_dtype(model)
    p, q = (functional.softmax(x, dim=-1) + _PROBABILITY_EPS for x in (own, start))
    importance = (own - start).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    ordered = importance.reshape(-1).sort().values
    last = len(ordered) - 1
    low, median, high = (ordered[last * quarter // 4] for quarter in (1, 2, 3))
    return start + torch.where(importance >= median + 1.5 * (high - low), own - start, 0.0)
