"""Advantages relative to a group: a reward minus the mean of its group, divided by a standard deviation or not."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.registry import register

Scale = Literal["group", "batch", "none"]
Singleton = Literal["zero", "raw"]


@register("advantage", "group", paper="2402.03300", needs=("groups",))
def group(
    batch: RolloutBatch,
    *,
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    singleton: Singleton = "zero",
) -> Tensor:
    """(reward - mean of its group) / (std + eps) -> [N]. Groups may differ in size.

    scale: `group` divides by the std of the group (GRPO), `batch` by that of all rewards of the batch (Lite PPO; the
    raw rewards, not the centred ones), `none` by nothing (Dr. GRPO). eps 1e-4 is TRL's, verl has 1e-6; ddof 1 in both.
    Rewards that could not be scored (NaN) are left out of mean and std and get 0. Equal rewards give exactly 0. A group
    with a single scored row gets 0, or with singleton `raw` its reward (as verl does: it hides a group size of 1).
    """
    if batch.rewards is None:
        raise ValueError("the batch has no rewards")
    return centred_and_scaled(batch.rewards, batch.group_ids, scale=scale, eps=eps, ddof=ddof, singleton=singleton)


def centred_and_scaled(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    singleton: Singleton = "zero",
) -> Tensor:
    """The one normaliser behind `group`: rewards [N], NaN = unscored; group_ids [N] any integers -> [N], detached."""
    rewards = rewards.detach()
    key = torch.unique(group_ids, return_inverse=True)[1]
    scored = ~rewards.isnan()
    count = group_sum(scored.to(rewards.dtype), key)
    centred = centre(rewards, scored, key, count)
    if scale == "group":
        spread = std(centred, key, count, ddof)[key]
    elif scale == "batch":
        everything = torch.zeros_like(key)
        total = count.sum().reshape(1)
        spread = std(centre(rewards, scored, everything, total), everything, total, ddof)
    else:
        return _singletons(centred, rewards, count[key], singleton)
    divisor = spread + eps
    # With eps 0 and no spread the numerator is 0 too: 0, not 0 / 0.
    scaled = torch.where(divisor > 0, centred / torch.where(divisor > 0, divisor, 1.0), 0.0)
    return _singletons(scaled, rewards, count[key], singleton)


def group_sum(values: Tensor, key: Tensor) -> Tensor:
    """Sum of values [N] by group number key [N] (0..K-1) -> [K]."""
    groups = int(key.max()) + 1 if len(key) else 0
    return values.new_zeros(groups).index_add(0, key, values)


def centre(rewards: Tensor, scored: Tensor, key: Tensor, count: Tensor) -> Tensor:
    """rewards - mean of the scored ones of the group [N], 0 where unscored.

    The group's smallest reward is taken off first, which is exact for equal rewards: the mean of three 0.1 is not 0.1.
    """
    infinity = torch.full_like(rewards, torch.inf)
    lowest = rewards.new_full(count.shape, torch.inf)
    lowest = lowest.scatter_reduce(0, key, torch.where(scored, rewards, infinity), "amin")
    shifted = torch.where(scored, rewards - lowest[key], 0.0)
    mean = group_sum(shifted, key) / count.clamp(min=1)
    return torch.where(scored, shifted - mean[key], 0.0)


def std(centred: Tensor, key: Tensor, count: Tensor, ddof: int) -> Tensor:
    """Standard deviation by group [K] of values that are centred already; 0 for groups of fewer than two."""
    squares = group_sum(centred.square(), key)
    return torch.where(count > 1, squares / (count - ddof).clamp(min=1), 0.0).sqrt()


def _singletons(advantages: Tensor, rewards: Tensor, count: Tensor, singleton: Singleton) -> Tensor:
    """Rows [N] whose group has `count` [N] scored rewards: fewer than two give 0, or the reward if `raw`."""
    alone = torch.where(rewards.isnan(), 0.0, rewards) if singleton == "raw" else torch.zeros_like(rewards)
    return torch.where(count > 1, advantages, alone)
