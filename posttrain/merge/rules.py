"""Merge rules: pure functions from the tensors of one name to the merged tensor.

Every rule has the signature `rule(models, base, weights, *, keys...)`: `models` are the tensors of one name in the
order of the recipe, `base` is the base model's tensor or None, and there is one weight per model. Sums are in float32
(float64 if the inputs are), and the result is returned in that precision: the caller casts to the output's dtype.

Integer and boolean buffers cannot be averaged: `merge_tensor` copies them from the base or the first model.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import MergeError, count_noun
from posttrain.registry import register

MIN_WEIGHT_SUM = 1e-8  # a |sum of weights| below this is not used as a divisor


@register("merge", "linear", needs=("by_entry",))
def linear(
    models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, normalize: bool = True
) -> Tensor:
    """Return the weighted average sum_i w_i theta_i, divided by sum_i w_i with `normalize` (mergekit's `linear`).

    Ignores the base model. Normalized weights are scale-free, and a single model is returned unchanged. Raises
    MergeError if weights to be normalized cancel.
    """
    del base
    shares = normalize_weights(weights) if normalize else list(weights)
    total = shares[0] * to_sum_dtype(models[0])
    for share, tensor in zip(shares[1:], models[1:], strict=True):
        total += share * to_sum_dtype(tensor)
    return total


@register("merge", "task_arithmetic", paper="2212.04089", needs=("base_model", "by_entry"))
def task_arithmetic(
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    lam: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """Return base + lambda * sum_i w_i (theta_i - base); negative weights subtract a skill.

    This is mergekit's `task_arithmetic`. `normalize` divides the sum by sum_i w_i (off by default, as in mergekit).
    lambda 0 or all weights 0 give the base bit for bit. Raises MergeError without a base, or if weights to be
    normalized cancel.
    """
    if base is None:
        raise MergeError("task_arithmetic needs a base model", hint="add `base_model: ...`")
    shares = normalize_weights(weights) if normalize else list(weights)
    start = to_sum_dtype(base)
    total = start.clone()
    for share, tensor in zip(shares, models, strict=True):
        scale = lam * share
        if scale != 0:  # adding 0 * delta would turn -0.0 into 0.0
            total += scale * (to_sum_dtype(tensor) - start)
    return total


@register("merge", "passthrough", needs=("one_model", "by_entry"))
def passthrough(
    models: Sequence[Tensor], base: Tensor | None, weights: Sequence[float], *, scale: float | list[float] = 1.0
) -> Tensor:
    """Return the tensors of one model times `scale`, e.g. for stacks of layers (mergekit's `passthrough`).

    Layers are stacked with `slices`. `scale` may differ by tensor: `[{filter: o_proj, value: 0}, {value: 1}]` silences
    attention, for layers that should start as the identity.
    """
    del base, weights
    (model,) = models
    factor = scale[0] if isinstance(scale, list) else scale
    return to_sum_dtype(model).clone() if factor == 1 else factor * to_sum_dtype(model)


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum. Raises MergeError if they cancel."""
    total = sum(weights)
    if abs(total) < MIN_WEIGHT_SUM:
        listed = ", ".join(f"{w:g}" for w in weights)
        hint = "set `normalize: false`" if any(weights) else "give a model a weight that is not 0"
        raise MergeError(f"the weights {listed} sum to {total:g} and cannot be normalised", hint=hint)
    return [w / total for w in weights]


def to_sum_dtype(tensor: Tensor) -> Tensor:
    """Cast a tensor of any shape to the summation dtype: float64 stays, every other dtype becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def merge_tensor(
    rule: Callable[..., Tensor],
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    params: Mapping[str, Any],
    extra: Any = None,
) -> Tensor:
    """Merge one tensor; integer and boolean buffers are copied from the base or the first model.

    extra: the fourth argument of a rule that takes one (its draws, or a count of entries).
    """
    anchor = models[0] if base is None else base
    if not anchor.is_floating_point():
        return anchor.clone()
    return rule(models, base, weights, *([] if extra is None else [extra]), **params)


def merge_state(
    rule: Callable[..., Tensor],
    models: Sequence[Mapping[str, Tensor]],
    base: Mapping[str, Tensor] | None = None,
    weights: Sequence[float] | None = None,
    extras: Mapping[str, Any] | None = None,
    **params: Any,
) -> dict[str, Tensor]:
    """Merge state dicts in memory and return name -> merged tensor.

    weights: 1 each by default. extras: as in `merge_tensor`, by tensor name. Raises MergeError if there are no models,
    weights do not match models, or names and shapes differ.
    """
    if not models:
        raise MergeError("nothing to merge: no models")
    weights = [1.0] * len(models) if weights is None else list(weights)
    if len(weights) != len(models):
        raise MergeError(f"{count_noun(len(models), 'model')} but {count_noun(len(weights), 'weight')}")
    anchor = models[0] if base is None else base
    for model in models:
        _check_same_names_and_shapes(anchor, model)
    return {
        name: merge_tensor(
            rule,
            [m[name] for m in models],
            None if base is None else base[name],
            weights,
            params,
            None if extras is None else extras[name],
        )
        for name in anchor
    }


def _check_same_names_and_shapes(anchor: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Raise MergeError if two state dicts differ in tensor names or shapes."""
    differing = sorted(anchor.keys() ^ model.keys())
    if differing:
        raise MergeError(f"tensors that not every model has: {', '.join(differing)}")
    wrong = [name for name in anchor if anchor[name].shape != model[name].shape]
    if wrong:
        raise MergeError(f"tensors of different shape: {', '.join(wrong)}")
