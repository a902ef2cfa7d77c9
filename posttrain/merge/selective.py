"""Merge rules that choose entry by entry whose change is taken: by who made it, its size, or how much it matters.

Shapes: the tensors of one call have any shape, all the same; so has the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.merge.deltas import differences, require_base
from posttrain.merge.rules import to_sum_dtype
from posttrain.registry import register

_NEAREST = 1e-6  # nearswap: differences below this count as this
_NO_SPREAD = 1e-6  # sce: where the mean squares sum to less, every model counts alike
_NO_CHANCE = 1e-8  # arcee_fusion: added to probabilities before they are divided


@register("merge", "ram", paper="2601.13572", needs=("base_model", "by_entry"))
def ram(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, eps: float = 1e-5) -> Tensor:
    """For RL updates, which touch few entries: a change that only one model makes is taken in full.

    A model has changed an entry if |difference| > eps (mergekit's `epsilon`). Changed by none: the base; by one: its
    change; by several: the mean of their changes. eps must exceed the rounding step of the stored dtype.
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
    """`ram` in which a model's own changes grow with how much of what it changed others changed too.

    Changes that only model i makes are multiplied by 1 + r min(rho_i, alpha), rho_i the number of its shared changes
    over that of its own ones, counted in each tensor (mergekit's `ramplus_tl`: RAM+ of the paper, tensor by tensor).
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
    """The base, and the other model where it is nearer than t: base + min(1, t / |difference|) difference.

    So no entry moves by more than t (mergekit's `nearswap`, from
    https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001, which takes t = 1e-4).
    """
    del weights
    start = require_base(base, "nearswap")
    (model,) = models
    share = (t / (start - to_sum_dtype(model)).abs().clamp(min=_NEAREST)).clamp(0, 1)
    return share * to_sum_dtype(model) + (1 - share) * start


@register("merge", "sce", paper="2408.07990", needs=("base_model",))
def sce(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, select_topk: float = 1.0) -> Tensor:
    """Select, calculate, erase (FuseChat's SCE): entries on which models differ most, weighted by their squares.

    Of the entries whose variance over the models is not 0 the share `select_topk` with the largest variance is kept.
    Each model counts by the mean square of what is kept of its difference, all alike where these sum to less than 1e-6;
    the sign of the sum is elected entry by entry, as in `ties`, and the average is over the models of that sign
    (mergekit's `sce`).
    """
    del weights
    start = require_base(base, "sce")
    deltas = torch.stack(list(differences(models, start)))
    if select_topk < 1:
        deltas = deltas * _most_varied(deltas, select_topk)
    squares = deltas.square().flatten(1).mean(1)
    total = float(squares.sum())
    shares = squares / total if total >= _NO_SPREAD else torch.full_like(squares, 1 / len(squares))
    elected = torch.where(deltas.sum(0) >= 0, 1.0, -1.0).to(deltas.dtype)
    counted = shares.view(-1, *[1] * start.dim()) * (deltas.sign() == elected)
    return start + (deltas * counted).sum(0) / counted.sum(0).clamp(min=_NO_SPREAD)


def _most_varied(deltas: Tensor, share: float) -> Tensor:
    """1 for the `share` of entries with the largest variance over the models [M, ...], among those that vary at all."""
    spread = deltas.var(dim=0, unbiased=False)
    count = int(int(spread.count_nonzero()) * max(share, 0.0))
    found = torch.zeros_like(spread)
    if count:
        found.view(-1)[spread.reshape(-1).topk(count).indices] = 1
    return found


@register("merge", "arcee_fusion", needs=("base_model", "one_model"))
def arcee_fusion(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float]) -> Tensor:
    """Take those entries of the other model whose change matters much: importance of at least median + 1.5 IQR.

    Importance of an entry: |difference| times the KL divergence between the softmax of its row (last axis) in the model
    and in the base. Quantiles are entries, the lower of two (mergekit's `arcee_fusion`, which draws 10^6 entries of
    larger tensors to find them; here all count).
    """
    del weights
    start = require_base(base, "arcee_fusion")
    (model,) = models
    own = to_sum_dtype(model)
    p, q = (functional.softmax(x, dim=-1) + _NO_CHANCE for x in (own, start))
    importance = (own - start).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    ordered = importance.reshape(-1).sort().values
    last = len(ordered) - 1
    low, median, high = (ordered[last * quarter // 4] for quarter in (1, 2, 3))
    return start + torch.where(importance >= median + 1.5 * (high - low), own - start, 0.0)
