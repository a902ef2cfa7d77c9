"""Merge rules on task vectors (model - base): sparsify each, elect signs or sum, scale, add to the base.

Every rule is `rule(models, base, weights, *, keys...)` as in rules.py. Rules that need `draws` get a tensor of uniform
numbers for each model as their fourth argument. A key that may differ between models takes one number, or a list of
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.errors import MergeError, counted
from posttrain.merge import sparsify
from posttrain.merge.blocks import blocks, by_block
from posttrain.merge.rules import CANCELS, raised
from posttrain.registry import register

PerModel = float | list[float]


@register("merge", "ties", paper="2306.01708", needs=("base_model",))
def ties(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    density: float | list[float] = 0.2,
    lam: float = 1.0,
    normalize: bool = True,
) -> Tensor:
    """Trim, elect a sign, merge what agrees (mergekit's `ties`).

    Of each difference the max(1, int(density n)) largest entries stay; the sign of their weighted sum is elected entry
    by entry (0 counts as +); the parts of that sign are summed and, with `normalize`, divided by their weights. The
    paper's density is 0.2. It elects by one threshold a model and averages without weights; this is mergekit's form.
    """
    start = required(base, "ties")
    parts = [
        sparsify.largest(delta, max(1, int(share * delta.numel())))
        for delta, share in zip(differences(models, start), each(density, models), strict=True)
    ]
    return added(start, elected(parts, weights, normalize), lam)


@register("merge", "dare_linear", paper="2311.03099", needs=("base_model", "draws", "by_entry"))
def dare_linear(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 0.5,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool = True,
) -> Tensor:
    """Keep each entry of a difference with the chance `density`, divide it by that, and sum (the paper's DARE).

    `rescale: false` leaves the kept entries as they are. density 1 is task arithmetic, density 0 the base. mergekit
    rescales by the ratio of L1 norms instead of 1 / density: other numbers for the same purpose.
    """
    start = required(base, "dare_linear")
    return added(start, summed(_dared(models, start, draws, density, rescale), weights, normalize), lam)


@register("merge", "dare_ties", paper="2311.03099", needs=("base_model", "draws", "by_entry"))
def dare_ties(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 0.5,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool = True,
) -> Tensor:
    """DARE's random drop, then the sign election of `ties`; not divided by the weights unless `normalize`."""
    start = required(base, "dare_ties")
    return added(start, elected(_dared(models, start, draws, density, rescale), weights, normalize), lam)


@register("merge", "della", paper="2406.11617", needs=("base_model", "draws"))
def della(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 0.7,
    epsilon: float | list[float] = 0.15,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool = True,
) -> Tensor:
    """DELLA: random drop in which larger entries of a row survive more often, then the sign election of `ties`.

    The chance runs from density - epsilon (smallest of a row) to density + epsilon (largest), held within [0, 1]; a
    kept entry is divided by its own. mergekit rescales by L1 norms instead, and its default for this rule is
    `normalize: true`.
    """
    start = required(base, "della")
    return added(start, elected(_della(models, start, draws, density, epsilon, rescale), weights, normalize), lam)


@register("merge", "della_linear", paper="2406.11617", needs=("base_model", "draws"))
def della_linear(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 0.7,
    epsilon: float | list[float] = 0.15,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool = True,
) -> Tensor:
    """DELLA's random drop, then the plain weighted sum."""
    start = required(base, "della_linear")
    return added(start, summed(_della(models, start, draws, density, epsilon, rescale), weights, normalize), lam)


@register("merge", "breadcrumbs", paper="2312.06795", needs=("base_model",))
def breadcrumbs(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    density: float | list[float] = 0.9,
    gamma: float | list[float] = 0.01,
    lam: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """Drop the int(gamma n) largest entries of each difference, keep the int(density n) next ones, sum.

    Where nothing is dropped at the top mergekit's slice is empty by mistake; this does what was meant.
    """
    start = required(base, "breadcrumbs")
    return added(start, summed(_crumbs(models, start, density, gamma), weights, normalize), lam)


@register("merge", "breadcrumbs_ties", paper="2312.06795", needs=("base_model",))
def breadcrumbs_ties(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    density: float | list[float] = 0.9,
    gamma: float | list[float] = 0.01,
    lam: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """`breadcrumbs` with the sign election of `ties` instead of the sum."""
    start = required(base, "breadcrumbs_ties")
    return added(start, elected(_crumbs(models, start, density, gamma), weights, normalize), lam)


@register("merge", "update_selective", paper="2510.15110", needs=("base_model", "one_model"))
def update_selective(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    count: int | None = None,
    *,
    density: float = 0.25,
    scale: float = 0.7,
    granularity: Literal["tensor", "global"] = "tensor",
    at_least_one: bool = True,
) -> Tensor:
    """DLER's update-selective merge: base + scale * the int(density n) largest entries of (model - base).

    Restores accuracy that was lost in length training, while answers stay nearly as short. The paper does not state
    whether its quarter is taken per `tensor` (every layer is represented) or over the whole model (`global`: passes
    over both models first count the entries to keep in each tensor). `at_least_one` keeps one entry where the share
    rounds to none.
    """
    del weights
    start = required(base, "update_selective")
    (delta,) = differences(models, start)
    if granularity == "tensor":
        count = max(int(density * delta.numel()), int(at_least_one and density > 0))
    elif count is None:
        raise MergeError("granularity `global` needs the count of the tensor")
    return added(start, sparsify.largest(delta, count), scale)


@register("merge", "ram", needs=("base_model", "by_entry"))
def ram(models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, eps: float = 1e-5) -> Tensor:
    """For RL updates, which touch few entries: a change that only one model makes is taken in full.

    A model has changed an entry if |difference| > eps. Changed by none: the base; by one: its change; by several: the
    mean of their changes. eps must exceed the rounding step of the stored dtype.
    """
    del weights
    start = required(base, "ram")
    total, count = torch.zeros_like(start), torch.zeros_like(start)
    for delta in differences(models, start):
        changed = delta.abs() > eps
        total += torch.where(changed, delta, torch.zeros_like(delta))
        count += changed
    return start + total / count.clamp(min=1)


@register("merge", "model_stock", paper="2403.19522", needs=("base_model", "several_models"))
def model_stock(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    eps: float = 1e-8,
    filter_wise: bool = False,
) -> Tensor:
    """t * mean of the models + (1 - t) * base, with t from the angles between the differences.

    One t a tensor, or one a row of each matrix with `filter_wise`. A mean cosine below 0 counts as 0: opposed
    differences give the base (the paper does not state it; mergekit goes to the other side of the base then). Raises
    MergeError for fewer than two models.
    """
    del weights
    start = required(base, "model_stock")
    if filter_wise and start.dim() > 1:
        share = stock_share([delta.flatten(1) for delta in differences(models, start)], eps)
        wide = share.view(-1, *[1] * (start.dim() - 1)).expand_as(start)
        return by_block(_stocked, start, wide, *models, dtype=start.dtype)
    share = stock_share_of_products(_products(models, start), len(models), eps)
    return by_block(lambda x, *own: _stocked(x, share.to(x.dtype), *own), start, *models, dtype=start.dtype)


def _stocked(start: Tensor, share: Tensor, *models: Tensor) -> Tensor:
    return share * torch.stack([raised(model) for model in models]).mean(0) + (1 - share) * start


def _products(models: Sequence[Tensor], start: Tensor) -> dict[tuple[int, int], Tensor]:
    """Inner products of the differences, summed block by block in float64."""
    pairs = list(itertools.combinations_with_replacement(range(len(models)), 2))
    found = dict.fromkeys(pairs, 0.0)
    for x, *own in blocks(start, *models):
        deltas = [raised(model) - x for model in own]
        for i, j in pairs:
            found[i, j] += float(torch.dot(deltas[i], deltas[j]))
    return {pair: torch.tensor(value, dtype=torch.float64) for pair, value in found.items()}


def stock_share(deltas: Sequence[Tensor], eps: float) -> Tensor:
    """model_stock's t [R] from rows [R, n] of each model."""
    pairs = itertools.combinations_with_replacement(range(len(deltas)), 2)
    return stock_share_of_products({(i, j): (deltas[i] * deltas[j]).sum(-1) for i, j in pairs}, len(deltas), eps)


def stock_share_of_products(products: Mapping[tuple[int, int], Tensor], count: int, eps: float) -> Tensor:
    """model_stock's t: N c / (1 + (N - 1) c), c the mean cosine of all pairs of N differences, held within [0, 1].

    products: (i, j), i <= j -> inner product of the differences i and j. A pair in which one has a norm of at most eps
    counts as cosine 0.
    """
    if count < 2:
        raise MergeError("model_stock needs at least two models beside the base")
    cosines = []
    for i, j in itertools.combinations(range(count), 2):
        norms = products[i, i].sqrt(), products[j, j].sqrt()
        there = (norms[0] > eps) & (norms[1] > eps)
        whole = torch.where(there, norms[0] * norms[1], torch.ones_like(norms[0]))
        cosines.append(torch.where(there, products[i, j] / whole, torch.zeros_like(whole)))
    cosine = torch.stack(cosines).mean(0).clamp(0, 1)
    return count * cosine / (1 + (count - 1) * cosine)


@register("merge", "reasoning_vector", paper="2509.01363", needs=("base_model", "two_models", "by_entry"))
def reasoning_vector(
    models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, alpha: float = 1.0
) -> Tensor:
    """base_model + alpha * (first model - second model): what RL added to one model, given to another.

    The first model is the one after RL, the second the one it started from, `base_model` the one that gets it.
    alpha < 0 takes reasoning away; alpha 0 is the base bit for bit. Tensors are left out with `alpha: [{filter:
    embed_tokens, value: 0}, {value: 1}]`. The paper uses alpha 1.
    """
    del weights
    plus, minus = models
    start = required(base, "reasoning_vector")
    return start.clone() if alpha == 0 else start + alpha * (raised(plus) - raised(minus))


def required(base: Tensor | None, name: str) -> Tensor:
    """The base in float32 or float64, in which sums are made. Raises MergeError if there is none."""
    if base is None:
        raise MergeError(f"{name} needs a base model", hint="add `base_model: ...`")
    return raised(base)


def differences(models: Sequence[Tensor], start: Tensor) -> Iterator[Tensor]:
    """model - start, made one at a time, so that only one is in memory."""
    return (raised(model) - start for model in models)


def each(value: PerModel, models: Sequence[Tensor]) -> list[float]:
    """A value for each model. Raises MergeError for a list of another length."""
    if not isinstance(value, list):
        return [value] * len(models)
    if len(value) != len(models):
        raise MergeError(f"{counted(len(value), 'value')} for {counted(len(models), 'model')}")
    return value


def summed(parts: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """sum_i w_i part_i, divided by sum_i w_i with `normalize` (by 1 where the weights cancel, as in mergekit)."""
    whole = sum(weights)
    divide = normalize and abs(whole) >= CANCELS

    def of(*own: Tensor) -> Tensor:
        total = torch.zeros_like(own[0])
        for weight, part in zip(weights, own, strict=True):
            total += weight * part
        return total / whole if divide else total

    return by_block(of, *parts)


def elected(parts: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """The sum of the weighted parts that have the sign of the whole sum, entry by entry; a sum of 0 counts as +.

    With `normalize` divided by the weights of what was summed (by 1 where they cancel). An entry that is 0 never votes.
    """
    return by_block(lambda *own: _elected(own, weights, normalize), *parts)


def _elected(parts: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    weighted = [weight * part for weight, part in zip(weights, parts, strict=True)]
    whole = torch.zeros_like(parts[0])
    for part in weighted:
        whole += part
    sign = torch.where(whole >= 0, 1.0, -1.0).to(whole.dtype)
    total, divisor = torch.zeros_like(whole), torch.zeros_like(whole)
    for weight, part in zip(weights, weighted, strict=True):
        agrees = part.sign() == sign
        total += torch.where(agrees, part, part.new_zeros(()))
        divisor += weight * agrees
    return total / torch.where(divisor.abs() < CANCELS, torch.ones_like(divisor), divisor) if normalize else total


def added(start: Tensor, change: Tensor, scale: float) -> Tensor:
    """start + scale * change; with scale 0 the start bit for bit."""
    return start.clone() if scale == 0 else by_block(lambda x, y: x + scale * y, start, change)


def _dared(
    models: Sequence[Tensor], start: Tensor, draws: Sequence[Tensor], density: PerModel, rescale: bool
) -> list[Tensor]:
    return [
        sparsify.by_chance(delta, share, draw, rescale=rescale)
        for delta, share, draw in zip(differences(models, start), each(density, models), draws, strict=True)
    ]


def _della(
    models: Sequence[Tensor],
    start: Tensor,
    draws: Sequence[Tensor],
    density: PerModel,
    epsilon: PerModel,
    rescale: bool,
) -> list[Tensor]:
    shares, spreads = each(density, models), each(epsilon, models)
    return [
        sparsify.by_chance(delta, sparsify.rank_probabilities(delta, share, spread), draw, rescale=rescale)
        for delta, share, spread, draw in zip(differences(models, start), shares, spreads, draws, strict=True)
    ]


def _crumbs(models: Sequence[Tensor], start: Tensor, density: PerModel, gamma: PerModel) -> list[Tensor]:
    return [
        sparsify.middling(delta, share, top)
        for delta, share, top in zip(
            differences(models, start), each(density, models), each(gamma, models), strict=True
        )
    ]
