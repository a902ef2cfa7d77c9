"""Merge rules that interpolate directions and norms separately: along great circles, and averages on the sphere.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result. Directions are those of
the flattened tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.merge.rules import to_sum_dtype
from posttrain.registry import register

_MIN_SINE = 1e-8  # two vectors whose angle has a smaller sine are interpolated linearly
_MIN_NORM = 1e-7  # lower bound of a norm
_MIN_WEIGHT_SUM = 1e-6  # if |sum of two weights| is smaller, t is 1/2


@register("merge", "nuslerp", needs=("two_models", "base_optional"))
def nuslerp(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    nuslerp_row_wise: bool = False,
    nuslerp_flatten: bool = True,
) -> Tensor:
    """Interpolate two models spherically by their weights: t = w_2 / (w_1 + w_2) (mergekit's `nuslerp`).

    Vectors are whole tensors, with `nuslerp_flatten: false` along the last axis, or with `nuslerp_row_wise` too along
    the first. With a `base_model` the differences from it are interpolated. Parallel vectors are interpolated linearly;
    a zero vector counts as orthogonal to all. Weights that cancel give t = 1/2.
    """
    weight_sum = sum(weights)
    t = 0.5 if abs(weight_sum) < _MIN_WEIGHT_SUM else weights[1] / weight_sum
    start = None if base is None else to_sum_dtype(base)
    x, y = (to_sum_dtype(model) if start is None else to_sum_dtype(model) - start for model in models)
    if nuslerp_flatten:
        merged = _slerp_vectors(x.reshape(-1), y.reshape(-1), t).view(x.shape)
    elif nuslerp_row_wise and x.dim() > 1:
        merged = _slerp_vectors(x.transpose(0, -1), y.transpose(0, -1), t).transpose(0, -1)
    else:
        merged = _slerp_vectors(x, y, t)
    return merged if start is None else start + merged


def _slerp_vectors(x: Tensor, y: Tensor, t: float) -> Tensor:
    """Interpolate from x (t 0) to y (t 1) on the great circle through both; vectors are along the last axis."""
    units = (v / v.norm(dim=-1, keepdim=True).clamp(min=_MIN_NORM) for v in (x, y))
    first, second = units
    angle = (first * second).sum(-1, keepdim=True).clamp(-1, 1).acos()
    sine = angle.sin()
    parallel = sine.abs() < _MIN_SINE
    curved = (((1 - t) * angle).sin() * x + (t * angle).sin() * y) / torch.where(parallel, torch.ones_like(sine), sine)
    return torch.where(parallel, (1 - t) * x + t * y, curved)


@register("merge", "multislerp", needs=("base_optional",))
def multislerp(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    normalize_weights: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Return the weighted mean direction of the models with their weighted mean norm (mergekit's `multislerp`).

    mergekit interpolates in the tangent plane of the sphere at that mean direction, where the weighted sum of all
    models is 0: so the result is the mean direction (https://goddard.blog/posts/multislerp-wow-what-a-cool-idea). With
    a `base_model`, the differences from it are merged. A single model is returned unchanged. Two models whose
    directions cancel are averaged linearly. Raises MergeError if the weighted directions of more than two models
    cancel.
    """
    if len(models) == 1:
        return to_sum_dtype(models[0]).clone()
    start = None if base is None else to_sum_dtype(base)
    vectors = torch.stack([to_sum_dtype(m) if start is None else to_sum_dtype(m) - start for m in models]).flatten(1)
    shares = vectors.new_tensor(list(weights))[:, None]
    if normalize_weights:
        shares = shares / shares.sum()
    lengths = vectors.norm(dim=-1, keepdim=True)
    mean = (vectors / (lengths + eps) * shares).sum(0)
    if mean.norm() < eps:
        if bool(lengths.any()) and len(models) != 2:
            raise MergeError("multislerp: the weighted directions cancel", hint="give other weights")
        found = (vectors * shares).sum(0)
    else:
        found = mean / mean.norm() * (lengths * shares).sum()
    found = found.view(models[0].shape)
    return found if start is None else start + found


@register("merge", "karcher")
def karcher(
    models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, max_iter: int = 10, tol: float = 1e-5
) -> Tensor:
    """Return the Karcher mean: the direction with the least squared angles to all models, at their mean norm.

    All models, including a `base_model`, have equal weight. Starting from the normalized mean, takes at most `max_iter`
    steps along the mean of the log maps, until a step is shorter than `tol` (mergekit's `karcher`;
    https://en.wikipedia.org/wiki/Fr%C3%A9chet_mean). Tensors with a norm of at most `tol` have no direction.
    """
    del base, weights
    vectors = [to_sum_dtype(model).reshape(-1) for model in models]
    if len(vectors) == 1:
        return to_sum_dtype(models[0]).clone()
    lengths = [float(vector.norm()) for vector in vectors]
    units = [vector / length for vector, length in zip(vectors, lengths, strict=True) if length > tol]
    if not units:
        return torch.zeros_like(to_sum_dtype(models[0]))
    found = compute_mean_direction(units, max_iter, tol)
    return (sum(lengths) / len(lengths) * found).view(models[0].shape)


def compute_mean_direction(units: Sequence[Tensor], max_iter: int, tol: float) -> Tensor:
    """Return the Karcher mean of unit vectors, see `karcher`; the first vector if they cancel."""
    mean = torch.stack(list(units)).mean(0)
    length = float(mean.norm())
    found = units[0].clone() if length < tol else mean / length
    for _ in range(max_iter):
        step = torch.zeros_like(found)
        for unit in units:
            cosine = torch.dot(found, unit).clamp(-1, 1)
            angle = cosine.acos()
            if float(angle) >= tol:
                step += (angle / angle.sin()) / len(units) * (unit - cosine * found)
        size = step.norm()
        if float(size) < tol:
            break
        found = size.cos() * found + size.sin() * (step / size)
        length = float(found.norm())
        found = found / length if length > tol else found
    return found
