"""Merges of state dicts (name -> tensor) that need more than one rule call per tensor.

Shapes: tensors of one name have any shape, the same in all models.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from posttrain.merge import deltas, global_topk
from posttrain.merge.rules import merge_state, to_sum_dtype

State = Mapping[str, Tensor]


def update_selective(
    base: State,
    tuned: State,
    *,
    density: float = 0.25,
    scale: float = 0.7,
    granularity: Literal["tensor", "global"] = "tensor",
    at_least_one: bool = True,
) -> dict[str, Tensor]:
    """Merge one model into its base with DLER's update-selective merge; see the rule of that name."""
    extras = None
    if granularity == "global":
        extras = global_topk.count_per_tensor(
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
    """Result of a reasoning-vector transfer: the model, incompatible tensors, and whether all were compatible."""

    merged: dict[str, Tensor]
    incompatible: list[str]
    compatible: bool


def reasoning_vector(
    target: State, grpo: State, sft: State, *, alpha: float = 1.0, skip: Sequence[str] = ()
) -> Transferred:
    """Return target + alpha * (grpo - sft); incompatible tensors are copied from the target and listed, never resized.

    skip: name patterns (`*embed_tokens*`) of tensors to copy. Tensors that only grpo or sft have are incompatible.
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
