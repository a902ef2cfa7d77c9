"""Merge rules on task vectors (model - base): sparsify each, elect signs or sum, scale, add to the base.

Every rule is `rule(models, base, weights, *, keys...)` as in rules.py. Rules that need `draws` get a tensor of uniform
random numbers per model as their fourth argument. A key that may differ between models takes one number, or one number
per model.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result. Stacked parts are [M,
...].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.errors import MergeError, count_noun
from posttrain.merge import sparsify
from posttrain.merge.blocks import iterate_blocks, map_blocks
from posttrain.merge.rules import MIN_WEIGHT_SUM, to_sum_dtype
from posttrain.registry import register

PerModel = float | list[float]
# true: to the L1 norm of the whole difference; chance: divide each entry by its probability
Rescale = bool | Literal["chance"]


@register("merge", "ties", paper="2306.01708", needs=("base_model",))
def ties(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    density: float | list[float] = 1.0,
    lam: float = 1.0,
    normalize: bool = True,
    rescale: bool = False,
) -> Tensor:
    """Trim the differences, elect a sign per entry, and merge the parts that agree with it (mergekit's `ties`).

    The max(1, int(density n)) largest entries of each difference stay, by default all (the paper keeps 0.2); `rescale`
    gives them the L1 norm of the whole difference. The elected sign of an entry is that of the weighted sum (0 counts
    as +); the parts with that sign are summed and, with `normalize`, divided by the sum of their weights. The paper
    elects with one threshold per model and averages without weights; this is mergekit's form.
    """
    start = require_base(base, "ties")
    parts = [
        _rescale_kept(delta, sparsify.keep_largest(delta, max(1, int(share * delta.numel()))), rescale)
        for delta, share in zip(differences(models, start), expand_per_model(density, models), strict=True)
    ]
    return add_delta(start, elect_signs(parts, weights, normalize), lam)


@register("merge", "dare_linear", paper="2311.03099", needs=("base_model", "draws"))
def dare_linear(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 1.0,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool | Literal["chance"] = True,
) -> Tensor:
    """Keep each entry of a difference with probability `density`, rescale the kept entries, and sum (DARE).

    `rescale: true` gives the kept entries the L1 norm of the whole difference, as in mergekit; `chance` divides them by
    `density`, as in the paper: the same on average; `false` leaves them unchanged. density 1, the default, is task
    arithmetic; density 0 gives the base.
    """
    start = require_base(base, "dare_linear", whole=False)
    return _merge_dare(
        models, start, draws, density, rescale, lambda parts: weighted_sum(parts, weights, normalize), lam
    )


@register("merge", "dare_ties", paper="2311.03099", needs=("base_model", "draws"))
def dare_ties(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 1.0,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool | Literal["chance"] = True,
) -> Tensor:
    """Apply DARE's random drop, then the sign election of `ties`; divide by the weights only with `normalize`."""
    start = require_base(base, "dare_ties", whole=False)
    return _merge_dare(
        models, start, draws, density, rescale, lambda parts: elect_signs(parts, weights, normalize), lam
    )


@register("merge", "della", paper="2406.11617", needs=("base_model", "draws"))
def della(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 1.0,
    epsilon: float | list[float] = 0.15,
    lam: float = 1.0,
    normalize: bool = True,
    rescale: bool | Literal["chance"] = True,
) -> Tensor:
    """Drop entries at random, larger entries of a row less often (DELLA), then elect signs as in `ties`.

    The probability of keeping an entry runs from density - epsilon (smallest of a row) to density + epsilon (largest),
    clamped to [0, 1]. A density of at least 1, the default, keeps all entries, a density of 0 none. `rescale: true`
    gives the kept entries the L1 norm of the whole difference, as in mergekit; `chance` divides each kept entry by its
    probability, as in the paper.
    """
    start = require_base(base, "della")
    return add_delta(
        start, elect_signs(_drop_della(models, start, draws, density, epsilon, rescale), weights, normalize), lam
    )


@register("merge", "della_linear", paper="2406.11617", needs=("base_model", "draws"))
def della_linear(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    draws: Sequence[Tensor],
    *,
    density: float | list[float] = 1.0,
    epsilon: float | list[float] = 0.15,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool | Literal["chance"] = True,
) -> Tensor:
    """Apply DELLA's random drop, then the plain weighted sum."""
    start = require_base(base, "della_linear")
    return add_delta(
        start, weighted_sum(_drop_della(models, start, draws, density, epsilon, rescale), weights, normalize), lam
    )


@register("merge", "breadcrumbs", paper="2312.06795", needs=("base_model",))
def breadcrumbs(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    density: float | list[float] = 1.0,
    gamma: float | list[float] = 0.01,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool = False,
) -> Tensor:
    """Drop the int(gamma n) largest entries of each difference, keep the int(density n) next ones, and sum.

    By default density is 1 and all entries are kept, as in mergekit (the paper keeps 0.9). `rescale` gives the kept
    entries the L1 norm of the whole difference. If nothing is dropped at the top, mergekit's slice is empty by mistake;
    this function keeps the intended entries.
    """
    start = require_base(base, "breadcrumbs")
    return add_delta(
        start, weighted_sum(_trim_differences(models, start, density, gamma, rescale), weights, normalize), lam
    )


@register("merge", "breadcrumbs_ties", paper="2312.06795", needs=("base_model",))
def breadcrumbs_ties(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    density: float | list[float] = 1.0,
    gamma: float | list[float] = 0.01,
    lam: float = 1.0,
    normalize: bool = False,
    rescale: bool = False,
) -> Tensor:
    """Apply the trimming of `breadcrumbs`, then the sign election of `ties` instead of the sum."""
    start = require_base(base, "breadcrumbs_ties")
    return add_delta(
        start, elect_signs(_trim_differences(models, start, density, gamma, rescale), weights, normalize), lam
    )


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
    """Add the largest entries of the difference: base + scale * the int(density n) largest of (model - base).

    This is DLER's update-selective merge. It restores accuracy lost in length training, while answers stay nearly as
    short. The paper does not state whether its quarter is taken per `tensor` (every layer is represented) or over the
    whole model (`global`: passes over both models first count the entries to keep in each tensor). `at_least_one` keeps
    one entry if the share rounds to none. Raises MergeError for granularity `global` without the count.
    """
    del weights
    start = require_base(base, "update_selective")
    (delta,) = differences(models, start)
    if granularity == "tensor":
        count = max(int(density * delta.numel()), int(at_least_one and density > 0))
    elif count is None:
        raise MergeError("granularity `global` needs the count of the tensor")
    return add_delta(start, sparsify.keep_largest(delta, count), scale)


@register("merge", "model_stock", paper="2403.19522", needs=("base_model", "several_models"))
def model_stock(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    eps: float = 1e-8,
    filter_wise: bool = False,
) -> Tensor:
    """Return t * mean of the models + (1 - t) * base, with t from the angles between the differences.

    t is computed per tensor, or per row of each matrix with `filter_wise`. A negative mean cosine counts as 0: opposed
    differences give the base (the paper does not define this case; mergekit extrapolates beyond the base). Raises
    MergeError for fewer than two models.
    """
    del weights
    start = require_base(base, "model_stock")
    if filter_wise and start.dim() > 1:
        ratio = stock_ratio([delta.flatten(1) for delta in differences(models, start)], eps)
        ratios = ratio.view(-1, *[1] * (start.dim() - 1)).expand_as(start)
        return map_blocks(_model_stock_step, start, ratios, *models, dtype=start.dtype)
    ratio = stock_ratio_from_products(_inner_products(models, start), len(models), eps)
    return map_blocks(lambda x, *own: _model_stock_step(x, ratio.to(x.dtype), *own), start, *models, dtype=start.dtype)


def _model_stock_step(start: Tensor, ratio: Tensor, *models: Tensor) -> Tensor:
    return ratio * torch.stack([to_sum_dtype(model) for model in models]).mean(0) + (1 - ratio) * start


def _inner_products(models: Sequence[Tensor], start: Tensor) -> dict[tuple[int, int], Tensor]:
    """Return the inner products of the differences, accumulated over blocks in float64."""
    pairs = list(itertools.combinations_with_replacement(range(len(models)), 2))
    products = dict.fromkeys(pairs, 0.0)
    for x, *own in iterate_blocks(start, *models):
        deltas = [to_sum_dtype(model) - x for model in own]
        for i, j in pairs:
            products[i, j] += float(torch.dot(deltas[i], deltas[j]))
    return {pair: torch.tensor(value, dtype=torch.float64) for pair, value in products.items()}


def stock_ratio(deltas: Sequence[Tensor], eps: float) -> Tensor:
    """Return model_stock's t [R] from rows [R, n] of each model."""
    pairs = itertools.combinations_with_replacement(range(len(deltas)), 2)
    return stock_ratio_from_products({(i, j): (deltas[i] * deltas[j]).sum(-1) for i, j in pairs}, len(deltas), eps)


def stock_ratio_from_products(products: Mapping[tuple[int, int], Tensor], count: int, eps: float) -> Tensor:
    """Return t = N c / (1 + (N - 1) c), c the mean cosine over all pairs of N differences, clamped to [0, 1].

    products: (i, j), i <= j -> inner product of differences i and j. A pair with a norm of at most eps counts as cosine
    0. Raises MergeError for fewer than two models.
    """
    if count < 2:
        raise MergeError("model_stock needs at least two models beside the base")
    cosines = []
    for i, j in itertools.combinations(range(count), 2):
        norms = products[i, i].sqrt(), products[j, j].sqrt()
        nonzero = (norms[0] > eps) & (norms[1] > eps)
        norm_product = torch.where(nonzero, norms[0] * norms[1], torch.ones_like(norms[0]))
        cosines.append(torch.where(nonzero, products[i, j] / norm_product, torch.zeros_like(norm_product)))
    cosine = torch.stack(cosines).mean(0).clamp(0, 1)
    return count * cosine / (1 + (count - 1) * cosine)


@register("merge", "reasoning_vector", paper="2509.01363", needs=("base_model", "two_models", "by_entry"))
def reasoning_vector(
    models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, alpha: float = 1.0
) -> Tensor:
    """Return base_model + alpha * (first model - second model): transfer what RL added to another model.

    The first model is the one after RL, the second its starting point, `base_model` the model to change. alpha < 0
    removes reasoning; alpha 0 gives the base bit for bit. Exclude tensors with `alpha: [{filter: embed_tokens, value:
    0}, {value: 1}]`. The paper uses alpha 1.
    """
    del weights
    plus, minus = models
    start = require_base(base, "reasoning_vector")
    return start.clone() if alpha == 0 else start + alpha * (to_sum_dtype(plus) - to_sum_dtype(minus))


def require_base(base: Tensor | None, name: str, *, whole: bool = True) -> Tensor:
    """Return the base tensor, with `whole` in the summation dtype (float32 or float64). Any shape.

    Raises MergeError if there is no base.
    """
    if base is None:
        raise MergeError(f"{name} needs a base model", hint="add `base_model: ...`")
    return to_sum_dtype(base) if whole else base


def differences(models: Sequence[Tensor], start: Tensor) -> Iterator[Tensor]:
    """Yield model - start for each model, one at a time, so that only one difference is in memory."""
    return (to_sum_dtype(model) - start for model in models)


def expand_per_model(value: PerModel, models: Sequence[Tensor]) -> list[float]:
    """Return one value per model. Raises MergeError for a list of a different length."""
    if not isinstance(value, list):
        return [value] * len(models)
    if len(value) != len(models):
        raise MergeError(f"{count_noun(len(value), 'value')} for {count_noun(len(models), 'model')}")
    return value


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Return sum_i w_i part_i, with `normalize` divided by sum_i w_i (by 1 if the weights cancel, as in mergekit)."""
    weight_sum = sum(weights)
    divides = normalize and abs(weight_sum) >= MIN_WEIGHT_SUM

    def compute_block(*blocks: Tensor) -> Tensor:
        total = torch.zeros_like(blocks[0])
        for weight, part in zip(weights, blocks, strict=True):
            total += weight * part
        return total / weight_sum if divides else total

    return map_blocks(compute_block, *parts)


def elect_signs(parts: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Sum the weighted parts that have the sign of the total sum, entry by entry; a total of 0 counts as +.

    With `normalize` the sum is divided by the weights of the summed parts (by 1 if they cancel). A zero entry has no
    vote.
    """
    return map_blocks(lambda *own: _elect_signs_in_block(own, weights, normalize), *parts)


def _elect_signs_in_block(parts: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Apply the sign election of `elect_signs` to one block."""
    weighted = [weight * part for weight, part in zip(weights, parts, strict=True)]
    weighted_sum_block = torch.zeros_like(parts[0])
    for part in weighted:
        weighted_sum_block += part
    sign = torch.where(weighted_sum_block >= 0, 1.0, -1.0).to(weighted_sum_block.dtype)
    total, divisor = torch.zeros_like(weighted_sum_block), torch.zeros_like(weighted_sum_block)
    for weight, part in zip(weights, weighted, strict=True):
        agrees = part.sign() == sign
        total += torch.where(agrees, part, part.new_zeros(()))
        divisor += weight * agrees
    return (
        total / torch.where(divisor.abs() < MIN_WEIGHT_SUM, torch.ones_like(divisor), divisor) if normalize else total
    )


def add_delta(start: Tensor, change: Tensor, scale: float) -> Tensor:
    """Return start + scale * change; scale 0 returns a bitwise copy of start."""
    return start.clone() if scale == 0 else map_blocks(lambda x, y: x + scale * y, start, change)


def _rescale_kept(delta: Tensor, kept: Tensor, rescale: bool) -> Tensor:
    return sparsify.restore_norm(kept, delta) if rescale and kept is not delta else kept


def _drop_randomly(delta: Tensor, chance: Tensor | float, draw: Tensor, rescale: Rescale) -> Tensor:
    """Keep the entries whose draw is below their probability, rescaled as requested."""
    kept = sparsify.keep_randomly(delta, chance, draw, rescale=rescale == "chance")
    return _rescale_kept(delta, kept, rescale is True)


def _merge_dare(
    models: Sequence[Tensor],
    start: Tensor,
    draws: Sequence[Tensor],
    density: PerModel,
    rescale: Rescale,
    combine: Callable[[list[Tensor]], Tensor],
    scale: float,
) -> Tensor:
    """Return start + scale * combine(sparsified differences), block by block after a first pass for the norms."""
    shares = expand_per_model(density, models)

    def drop_entries(x: Tensor, model: Tensor, draw: Tensor, share: float) -> tuple[Tensor, Tensor]:
        delta = to_sum_dtype(model) - to_sum_dtype(x)
        return delta, sparsify.keep_randomly(delta, share, draw, rescale=rescale == "chance") if share < 1 else delta

    factors = []
    for model, draw, share in zip(models, draws, shares, strict=True):
        sums = torch.zeros(2, dtype=torch.float64)
        for x, own, block_draw in iterate_blocks(start, model, draw) if rescale is True else ():
            sums += torch.stack(
                [part.abs().sum(dtype=torch.float64) for part in drop_entries(x, own, block_draw, share)]
            )
        factors.append(sparsify.norm_ratio(*sums.tolist()))

    def compute_block(x: Tensor, *rest: Tensor) -> Tensor:
        given = zip(rest[: len(models)], rest[len(models) :], shares, factors, strict=True)
        parts = [drop_entries(x, own, block_draw, share)[1] * factor for own, block_draw, share, factor in given]
        return to_sum_dtype(x) + scale * combine(parts)

    if scale == 0:
        return to_sum_dtype(start).clone()
    return map_blocks(compute_block, start, *models, *draws, dtype=torch.promote_types(start.dtype, torch.float32))


def _drop_della(
    models: Sequence[Tensor],
    start: Tensor,
    draws: Sequence[Tensor],
    density: PerModel,
    epsilon: PerModel,
    rescale: Rescale,
) -> list[Tensor]:
    """Return the differences after DELLA's random drop."""
    dropped = []
    given = zip(
        differences(models, start),
        expand_per_model(density, models),
        expand_per_model(epsilon, models),
        draws,
        strict=True,
    )
    for delta, share, spread, draw in given:
        if share >= 1 or share <= 0:
            dropped.append(delta if share >= 1 else torch.zeros_like(delta))
        else:
            dropped.append(
                _drop_randomly(delta, sparsify.compute_rank_probabilities(delta, share, spread), draw, rescale)
            )
    return dropped


def _trim_differences(
    models: Sequence[Tensor], start: Tensor, density: PerModel, gamma: PerModel, rescale: bool
) -> list[Tensor]:
    """Return the differences after the trimming of `breadcrumbs`."""
    given = zip(
        differences(models, start), expand_per_model(density, models), expand_per_model(gamma, models), strict=True
    )
    return [_rescale_kept(delta, sparsify.drop_extremes(delta, share, top), rescale) for delta, share, top in given]
