"""Advantages relative to a group: a reward minus the mean of its group, divided by a standard deviation or not.

One normaliser with a group key: the prompt (GRPO, Dr. GRPO, Lite PPO, RLOO), the whole batch, or a prompt and an agent.
"""

from __future__ import annotations

from typing import Any, Literal

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
    return centred_and_scaled(rewards_of(batch), batch.group_ids, scale=scale, eps=eps, ddof=ddof, singleton=singleton)


@register("advantage", "reward")
def reward(batch: RolloutBatch) -> Tensor:
    """The reward itself, compared with nothing -> [N]; 0 where there is none. For losses that read rewards on their own
    (`oreo`, `direct_advantage`), and for completions that stand alone."""
    return rewards_of(batch).nan_to_num(0.0)


@register("advantage", "rloo", paper="2402.14740", needs=("groups",))
def rloo(batch: RolloutBatch, *, singleton: Singleton = "zero", normalize: bool = False) -> Tensor:
    """reward - mean of the OTHER rewards of its group -> [N]: an unbiased baseline, as no row is part of its own.

    Equal to n / (n - 1) * (reward - mean of the group), n its scored rows: with groups of one size only the step size
    differs from Dr. GRPO; with unequal ones small groups weigh more (n = 2 doubles). RLOO is usually run with one
    update a batch and the KL inside the reward. normalize: then (A - mean) / (std + 1e-4) over the scored rows of the
    batch, as TRL offers it.
    """
    rewards = rewards_of(batch)
    found = centred_and_scaled(rewards, batch.group_ids, scale="none", singleton=singleton, leave_one_out=True)
    if not normalize:
        return found
    scored = torch.where(rewards.isnan(), torch.nan, found)
    return centred_and_scaled(scored, torch.zeros_like(batch.group_ids), eps=1e-4)


@register("advantage", "batch")
def whole_batch(batch: RolloutBatch, *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """(reward - mean of the batch) / (std of the batch + eps) -> [N], over all scored rows. Groups may be single rows.

    Groups do not matter: an all-right group gets a positive and an all-wrong one a negative advantage, so how hard a
    prompt is leaks in (centring by group removes that). Fewer than two scored rows, or equal rewards: 0. ROLL has eps
    1e-6.
    """
    return centred_and_scaled(rewards_of(batch), torch.zeros_like(batch.group_ids), eps=eps, ddof=ddof)


@register("advantage", "agent", paper="2602.08847", needs=("agent_ids", "prompt_ids"))
def agent(
    batch: RolloutBatch,
    *,
    agent_wise: bool = True,
    scale: Scale = "group",
    eps: float = 1e-6,
    ddof: int = 1,
    singleton: Singleton = "zero",
) -> Tensor:
    """Dr. MAS: each role is compared with itself. One row is one call of an agent -> [N].

    (reward - mean) / (std + eps) over the calls of one agent for one prompt; an agent that a trajectory calls three
    times counts three times. agent_wise False is the control: the mean reward of a trajectory, normalised over the
    trajectories of the prompt and given to all its calls. A single call gives 0; the authors' code gives its reward
    there, as singleton `raw` does.
    """
    rewards = rewards_of(batch)
    if agent_wise:
        key = joint(batch.group_ids, require_field(batch.agent_ids, "agent_ids"))
        return centred_and_scaled(rewards, key, scale=scale, eps=eps, ddof=ddof, singleton=singleton)
    trajectories = require_field(batch.trajectory_ids, "trajectory_ids")
    prompts = batch.group_ids if batch.prompt_ids is None else batch.prompt_ids
    return by_trajectory(rewards, prompts, trajectories, scale=scale, eps=eps, ddof=ddof, singleton=singleton)


def by_trajectory(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor, **normaliser: Any) -> Tensor:
    """Rows [N] that are steps or calls of trajectories: the mean reward of each trajectory is taken once, normalised
    within its group (keywords of `centred_and_scaled`) and given to all its rows."""
    key = joint(group_ids, trajectory_ids)
    count = group_sum((~rewards.isnan()).to(rewards.dtype), key)
    lowest = group_min(rewards.nan_to_num(nan=torch.inf), key)
    above = group_sum(torch.where(rewards.isnan(), 0.0, rewards - lowest[key]), key)
    means = torch.where(count > 0, lowest + above / count.clamp(min=1), torch.nan)  # exact where all rows are equal
    groups = torch.zeros_like(means, dtype=torch.long).scatter(0, key, group_ids)
    advantages = centred_and_scaled(means, groups, **normaliser)[key]
    return torch.where(rewards.isnan(), 0.0, advantages)


def rewards_of(batch: RolloutBatch) -> Tensor:
    """The rewards [N] of a batch. Raises ValueError if it has none."""
    if batch.rewards is None:
        raise ValueError("the batch has no rewards")
    return batch.rewards


def require_field(value: Tensor | None, name: str) -> Tensor:
    """A field of the batch that the caller cannot do without.

    It may have any shape. Raises ValueError if it is None.
    """
    if value is None:
        raise ValueError(f"the batch has no {name}")
    return value


def component_weights(batch: RolloutBatch) -> dict[str, float]:
    """Weight of each component: the recipe's; 1 where nothing is known, 0 for parts (`name/part`) of a component."""
    known = batch.reward_weights
    return {name: known.get(name, 0.0 if "/" in name else 1.0) for name in batch.components}


def number_groups(group_ids: Tensor) -> Tensor:
    """Group numbers [N] from 0, in order of the ids."""
    return torch.unique(group_ids, return_inverse=True)[1]


def joint(*ids: Tensor) -> Tensor:
    """One group number [N], 0..K-1, for rows whose ids [N] all agree, in order of the ids.

    As `torch.unique(torch.stack(ids), dim=1)` numbers them, which takes fifty times as long.
    """
    first, *others = (number_groups(own) for own in ids)
    for own in others:
        first = number_groups(first * len(own) + own)
    return first


def centred_and_scaled(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    singleton: Singleton = "zero",
    leave_one_out: bool = False,
) -> Tensor:
    """The one normaliser: rewards [N], NaN = unscored; group_ids [N] any integers -> [N], detached.

    leave_one_out: the mean is that of the other scored rows of the group.
    """
    rewards = rewards.detach()
    key = number_groups(group_ids)
    scored = ~rewards.isnan()
    count = group_sum(scored.to(rewards.dtype), key)
    centred = centre(rewards, scored, key, count)
    if leave_one_out:
        centred = centred * (count / (count - 1).clamp(min=1))[key]
    if scale != "none":
        if scale == "group":
            spread = std(centred, key, count, ddof)[key]
        else:
            everything = torch.zeros_like(key)
            total = count.sum().reshape(1)
            spread = std(centre(rewards, scored, everything, total), everything, total, ddof)
        divisor = spread + eps
        # With eps 0 and no spread the numerator is 0 too: 0, not 0 / 0.
        centred = torch.where(divisor > 0, centred / torch.where(divisor > 0, divisor, 1.0), 0.0)
    alone = torch.where(scored, rewards, 0.0) if singleton == "raw" else torch.zeros_like(rewards)
    return torch.where(count[key] > 1, centred, alone)


def group_sum(values: Tensor, key: Tensor) -> Tensor:
    """Sum of values [N] by group number key [N] (0..K-1) -> [K]."""
    groups = int(key.max()) + 1 if len(key) else 0
    return values.new_zeros(groups).index_add(0, key, values)


def group_min(values: Tensor, key: Tensor) -> Tensor:
    """Smallest of values [N] by group number key [N] (0..K-1) -> [K]."""
    groups = int(key.max()) + 1 if len(key) else 0
    return values.new_full((groups,), torch.inf).scatter_reduce(0, key, values, "amin")


def group_mean(values: Tensor, key: Tensor) -> Tensor:
    """Mean of values [N] by group number key [N], NaN left out -> [K], 0 for a group without any."""
    known = ~values.isnan()
    count = group_sum(known.to(values.dtype), key)
    return group_sum(torch.where(known, values, 0.0), key) / count.clamp(min=1)


def places(values: Tensor, key: Tensor) -> Tensor:
    """Place [N] of each row among those of its group by falling values [N], from 0; of equal ones the first comes
    first. key [N]: group numbers from 0."""
    falling = values.argsort(descending=True, stable=True)
    order = falling[key[falling].argsort(stable=True)]  # by group
    size = group_sum(torch.ones_like(key), key)
    within = torch.arange(len(key), device=key.device) - (size.cumsum(0) - size)[key[order]]
    return torch.empty_like(key).scatter(0, order, within)


def centre(rewards: Tensor, scored: Tensor, key: Tensor, count: Tensor) -> Tensor:
    """rewards - mean of the scored ones of the group [N], 0 where unscored.

    The group's smallest reward is taken off first, which is exact for equal rewards: the mean of three 0.1 is not 0.1.
    """
    lowest = group_min(torch.where(scored, rewards, torch.inf), key)
    shifted = torch.where(scored, rewards - lowest[key], 0.0)
    mean = group_sum(shifted, key) / count.clamp(min=1)
    return torch.where(scored, shifted - mean[key], 0.0)


def std(centred: Tensor, key: Tensor, count: Tensor, ddof: int) -> Tensor:
    """Standard deviation by group [K] of values that are centred already; 0 for groups of fewer than two."""
    squares = group_sum(centred.square(), key)
    return torch.where(count > 1, squares / (count - ddof).clamp(min=1), 0.0).sqrt()
