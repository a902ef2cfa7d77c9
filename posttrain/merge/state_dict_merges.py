"""Merges of whole models in memory that are more than one rule on each tensor; a model is name -> tensor.

Shapes: tensors of one name have any shape, the same in all models.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from posttrain.errors import MergeError
from posttrain.merge import deltas, global_topk, sparsify
from posttrain.merge.blends import greedy_soup
from posttrain.merge.rules import linear, merge_state, to_sum_dtype

State = Mapping[str, Tensor]


def draws_by_name(draws: Sequence[State]) -> dict[str, list[Tensor]]:
    """One state of draws a model -> the draws of all models by tensor."""
    return {name: [state[name] for state in draws] for name in draws[0]}


def with_draws(
    rule: Callable[..., Tensor], models: Sequence[State], base: State, draws: Sequence[State], **params: Any
) -> dict[str, Tensor]:
    """A rule that drops entries by chance, with its draws in the form of the models."""
    return merge_state(rule, models, base, extras=draws_by_name(draws), **params)


def keep_probabilities(
    models: Sequence[State], base: State, *, density: float = 0.7, epsilon: float = 0.15
) -> list[Tensor]:
    """DELLA's chances to keep an entry: tensors in the order of the base, for each of them the models in order."""
    return [
        sparsify.rank_probabilities(to_sum_dtype(model[name]) - to_sum_dtype(base[name]), density, epsilon)
        for name in base
        for model in models
    ]


def stock_shares(models: Sequence[State], base: State, *, eps: float = 1e-8) -> dict[str, float]:
    """model_stock's t by tensor."""
    return {
        name: float(
            deltas.stock_share([(to_sum_dtype(m[name]) - to_sum_dtype(base[name])).reshape(1, -1) for m in models], eps)
        )
        for name in base
    }


def update_selective(
    base: State,
    tuned: State,
    *,
    density: float = 0.25,
    scale: float = 0.7,
    granularity: Literal["tensor", "global"] = "tensor",
    at_least_one: bool = True,
) -> dict[str, Tensor]:
    """DLER's update-selective merge of one model into its base; see the rule of that name."""
    extras = None
    if granularity == "global":
        extras = global_topk.counts(
            lambda: ((name, to_sum_dtype(tuned[name]) - to_sum_dtype(base[name])) for name in base),
            density,
            at_least_one,
        )
    return merge_state(
        deltas.update_selective,
        [tuned],
        base,
        extras=extras,
        density=density,
        scale=scale,
        granularity=granularity,
        at_least_one=at_least_one,
    )


class Transferred(NamedTuple):
    """A reasoning vector applied: the model, the tensors that did not fit, and whether all did."""

    merged: dict[str, Tensor]
    incompatible: list[str]
    compatible: bool


def reasoning_vector(
    target: State, grpo: State, sft: State, *, alpha: float = 1.0, skip: Sequence[str] = ()
) -> Transferred:
    """target + alpha * (grpo - sft); what does not fit is copied from the target and listed, never cut to size.

    skip: patterns (`*embed_tokens*`) of names that are copied. Tensors that only grpo or sft have are not compatible.
    """
    merged: dict[str, Tensor] = {}
    incompatible = []
    for name, tensor in target.items():
        merged[name] = tensor
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            continue
        if any(name not in state or state[name].shape != tensor.shape for state in (grpo, sft)):
            incompatible.append(name)
        elif tensor.is_floating_point():
            merged[name] = deltas.reasoning_vector([grpo[name], sft[name]], tensor, (), alpha=alpha)
    extra = (grpo.keys() | sft.keys()) - target.keys()
    return Transferred(merged, incompatible, not incompatible and not extra)


class Soup(NamedTuple):
    """A soup and the models that it is made of, in the order in which they were taken in."""

    merged: dict[str, Tensor]
    kept: list[int]


def model_soup(
    models: Sequence[State],
    *,
    mode: Literal["uniform", "greedy"] = "uniform",
    val_scores: Sequence[float] | None = None,
    table: Mapping[str, float] | None = None,
) -> Soup:
    """The mean of all models, or of those that a greedy soup keeps.

    greedy: `val_scores` holds each model's validation score, `table` those of sets: "0,2" -> score. Raises MergeError
    for a greedy soup without validation scores.
    """
    kept = list(range(len(models)))
    if mode == "greedy":
        if val_scores is None or table is None:
            raise MergeError("a greedy soup needs the validation scores of the models and of their sets")
        kept = greedy_soup(val_scores, lambda indices: table[",".join(map(str, indices))])
    return Soup(merge_state(linear, [models[i] for i in kept]), kept)
