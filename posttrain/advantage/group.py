"""Advantages relative to a group: a reward minus the mean of its group, optionally divided by a standard deviation.

One normalizer with a group key: the prompt (GRPO, Dr. GRPO, Lite PPO, RLOO), the whole batch, or a prompt and an agent.
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
    """Normalize rewards within their group: (reward - mean) / (std + eps) -> [N]. Groups may differ in size.

    scale: `group` divides by the std of the group (GRPO), `batch` by the std of all rewards of the batch (Lite PPO; of
    the raw rewards, not the centered ones), `none` does not divide (Dr. GRPO). eps 1e-4 is TRL's, verl has 1e-6; ddof 1
    in both. Rewards that could not be scored (NaN) are excluded from mean and std and get 0. Equal rewards give exactly
    0. A group with a single scored row gets 0, or with singleton `raw` its reward (as in verl, where a group size of 1
    goes unnoticed).
    """
    return normalize_by_group(
        require_rewards(batch), batch.group_ids, scale=scale, eps=eps, ddof=ddof, singleton=singleton
    )


@register("advantage", "reward")
def reward(batch: RolloutBatch) -> Tensor:
    """Return the reward itself as the advantage -> [N]; 0 for unscored rows.

    For losses that read rewards directly (`oreo`, `direct_advantage`), and for completions without a group.
    """
    return require_rewards(batch).nan_to_num(0.0)


@register("advantage", "rloo", paper="2402.14740", needs=("groups",))
def rloo(batch: RolloutBatch, *, singleton: Singleton = "zero", normalize: bool = False) -> Tensor:
    """Subtract the mean of the other rewards of the group (leave-one-out) -> [N].

    The baseline is unbiased, because a row is not part of its own. Equal to n / (n - 1) * (reward - mean of the group),
    n its scored rows: with groups of one size only the step size differs from Dr. GRPO; with unequal sizes small groups
    weigh more (n = 2 doubles). RLOO is usually run with one update per batch and the KL inside the reward. normalize:
    also apply (A - mean) / (std + 1e-4) over the scored rows of the batch, as TRL offers.
    """
    rewards = require_rewards(batch)
    found = normalize_by_group(rewards, batch.group_ids, scale="none", singleton=singleton, leave_one_out=True)
    if not normalize:
        return found
    scored = torch.where(rewards.isnan(), torch.nan, found)
    return normalize_by_group(scored, torch.zeros_like(batch.group_ids), eps=1e-4)


@register("advantage", "remax", paper="2310.10505", needs=("greedy_rewards",))
def remax(batch: RolloutBatch) -> Tensor:
    """Subtract the reward of the prompt's greedy answer -> [N]; the deviation is not normalized.

    The step samples one greedy answer more per prompt, which is scored and not trained on. The baseline does not depend
    on the sampled rows, so a group may be a single row. A row without a score, or whose greedy answer has none, gets 0.
    """
    baselines = require_field(batch.greedy_rewards, "greedy_rewards").to(require_rewards(batch))
    return (require_rewards(batch) - baselines).nan_to_num(0.0)


@register("advantage", "opo", paper="2505.23585", needs=("groups", "lengths"))
def opo(batch: RolloutBatch, *, singleton: Singleton = "zero") -> Tensor:
    """Subtract the length-weighted mean reward of the group -> [N]; the deviation is not normalized.

    Baseline: sum(length * reward) / sum(length) over the scored rows. It has the least variance if the squared gradient
    of a row's log-prob grows with its length. length: tokens that the model sampled. singleton: see `group`.
    """
    rewards = require_rewards(batch)
    scored, key = ~rewards.isnan(), number_groups(batch.group_ids)
    weights = torch.where(scored, require_field(batch.lengths, "lengths").to(rewards.dtype), 0.0)
    lowest = group_min(torch.where(scored, rewards, torch.inf), key)
    above = torch.where(scored, rewards - lowest[key], 0.0)  # equal rewards give exactly 0
    baseline = group_sum(weights * above, key) / group_sum(weights, key).clamp(min=1)
    several = (group_sum(scored.to(rewards.dtype), key) > 1)[key]
    alone = torch.where(scored, rewards, 0.0) if singleton == "raw" else torch.zeros_like(rewards)
    return torch.where(several, torch.where(scored, above - baseline[key], 0.0), alone)


@register("advantage", "batch")
def whole_batch(batch: RolloutBatch, *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """Normalize rewards over the whole batch: (reward - mean) / (std + eps) -> [N].

    Over all scored rows; groups may be single rows.

    Groups are ignored: an all-right group gets a positive and an all-wrong group a negative advantage, so the advantage
    also reflects prompt difficulty (centering by group removes that). Fewer than two scored rows, or equal rewards,
    give 0. ROLL has eps 1e-6.
    """
    return normalize_by_group(require_rewards(batch), torch.zeros_like(batch.group_ids), eps=eps, ddof=ddof)


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
    """Normalize rewards over the calls of one agent for one prompt (Dr. MAS) -> [N]. One row is one call of an agent.

    (reward - mean) / (std + eps); an agent that a trajectory calls three times counts three times. agent_wise False is
    the control: the mean reward of a trajectory, normalized over the trajectories of the prompt and given to all its
    calls. A single call gives 0; in the authors' code it gives its reward, as singleton `raw` does.
    """
    rewards = require_rewards(batch)
    if agent_wise:
        key = combine_ids(batch.group_ids, require_field(batch.agent_ids, "agent_ids"))
        return normalize_by_group(rewards, key, scale=scale, eps=eps, ddof=ddof, singleton=singleton)
    trajectories = require_field(batch.trajectory_ids, "trajectory_ids")
    prompts = batch.group_ids if batch.prompt_ids is None else batch.prompt_ids
    return normalize_by_trajectory(rewards, prompts, trajectories, scale=scale, eps=eps, ddof=ddof, singleton=singleton)


def normalize_by_trajectory(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor, **normalizer: Any) -> Tensor:
    """Normalize the mean reward of each trajectory within its group and give it to all rows of the trajectory [N].

    Rows are steps or calls. normalizer: keywords of `normalize_by_group`. A trajectory counts once, however many rows
    it has.
    """
    key = combine_ids(group_ids, trajectory_ids)
    count = group_sum((~rewards.isnan()).to(rewards.dtype), key)
    lowest = group_min(rewards.nan_to_num(nan=torch.inf), key)
    above = group_sum(torch.where(rewards.isnan(), 0.0, rewards - lowest[key]), key)
    means = torch.where(count > 0, lowest + above / count.clamp(min=1), torch.nan)  # exact if all rows are equal
    groups = torch.zeros_like(means, dtype=torch.long).scatter(0, key, group_ids)
    advantages = normalize_by_group(means, groups, **normalizer)[key]
    return torch.where(rewards.isnan(), 0.0, advantages)


def require_rewards(batch: RolloutBatch) -> Tensor:
    """Return the rewards [N] of a batch. Raises ValueError if it has none."""
    if batch.rewards is None:
        raise ValueError("the batch has no rewards")
    return batch.rewards


def require_field(value: Tensor | None, name: str) -> Tensor:
    """Return an optional field of the batch, of any shape. Raises ValueError if it is None."""
    if value is None:
        raise ValueError(f"the batch has no {name}")
    return value


def component_weights(batch: RolloutBatch) -> dict[str, float]:
    """Return the weight of each reward component: the recipe's, else 1, or 0 for parts (`name/part`) of a component."""
    known = batch.reward_weights
    return {name: known.get(name, 0.0 if "/" in name else 1.0) for name in batch.components}


def number_groups(group_ids: Tensor) -> Tensor:
    """Return group numbers [N] from 0, in ascending order of the ids."""
    return torch.unique(group_ids, return_inverse=True)[1]


def combine_ids(*ids: Tensor) -> Tensor:
    """Return one group number [N], 0..K-1, per distinct combination of ids [N], in ascending order.

    Same numbering as `torch.unique(torch.stack(ids), dim=1)`, which takes fifty times as long.
    """
    combined, *others = (number_groups(numbers) for numbers in ids)
    for numbers in others:
        combined = number_groups(combined * len(numbers) + numbers)
    return combined


def sort_by_rollout(trajectory_ids: Tensor, step_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order [N] of rows by rollout and step, the last row of each rollout [R], and its row count [R].

    trajectory_ids, step_ids [N]; rollouts are in ascending order of their ids.
    """
    numbers, counts = torch.unique(trajectory_ids, return_inverse=True, return_counts=True)[1:]
    order = (numbers * (int(step_ids.max()) + 1) + step_ids).argsort()
    return order, order[counts.cumsum(0) - 1], counts


def normalize_by_group(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    singleton: Singleton = "zero",
    leave_one_out: bool = False,
) -> Tensor:
    """Compute (reward - mean) / (std + eps) within groups [N], detached. rewards [N]: NaN = unscored; group_ids [N]:
    any integers.

    leave_one_out: subtract the mean of the other scored rows of the group. See `group` for the other arguments.
    """
    rewards = rewards.detach()
    key = number_groups(group_ids)
    scored = ~rewards.isnan()
    count = group_sum(scored.to(rewards.dtype), key)
    centered = center_by_group(rewards, scored, key, count)
    if leave_one_out:
        centered = centered * (count / (count - 1).clamp(min=1))[key]
    if scale != "none":
        if scale == "group":
            spread = group_std(centered, key, count, ddof)[key]
        else:
            everything = torch.zeros_like(key)
            total = count.sum().reshape(1)
            spread = group_std(center_by_group(rewards, scored, everything, total), everything, total, ddof)
        divisor = spread + eps
        # With eps 0 and no spread the numerator is also 0: return 0, not 0 / 0.
        centered = torch.where(divisor > 0, centered / torch.where(divisor > 0, divisor, 1.0), 0.0)
    alone = torch.where(scored, rewards, 0.0) if singleton == "raw" else torch.zeros_like(rewards)
    return torch.where(count[key] > 1, centered, alone)


def group_sum(values: Tensor, key: Tensor) -> Tensor:
    """Sum values [N] by group number key [N] (0..K-1) -> [K]."""
    groups = int(key.max()) + 1 if len(key) else 0
    return values.new_zeros(groups).index_add(0, key, values)


def group_min(values: Tensor, key: Tensor) -> Tensor:
    """Return the smallest of values [N] by group number key [N] (0..K-1) -> [K]."""
    groups = int(key.max()) + 1 if len(key) else 0
    return values.new_full((groups,), torch.inf).scatter_reduce(0, key, values, "amin")


def group_mean(values: Tensor, key: Tensor) -> Tensor:
    """Average values [N] by group number key [N], excluding NaN -> [K]; 0 for a group without values."""
    known = ~values.isnan()
    count = group_sum(known.to(values.dtype), key)
    return group_sum(torch.where(known, values, 0.0), key) / count.clamp(min=1)


def rank_in_group(values: Tensor, key: Tensor) -> Tensor:
    """Return the rank [N] of each row within its group by descending values [N], from 0; ties keep the row order.

    key [N]: group numbers from 0.
    """
    descending = values.argsort(descending=True, stable=True)
    order = descending[key[descending].argsort(stable=True)]  # by group
    size = group_sum(torch.ones_like(key), key)
    within = torch.arange(len(key), device=key.device) - (size.cumsum(0) - size)[key[order]]
    return torch.empty_like(key).scatter(0, order, within)


def center_by_group(rewards: Tensor, scored: Tensor, key: Tensor, count: Tensor) -> Tensor:
    """Subtract the mean of the scored rewards of the group [N]; 0 for unscored rows.

    The group's smallest reward is subtracted first, so that equal rewards give exactly 0: the mean of three 0.1 is not
    0.1.
    """
    lowest = group_min(torch.where(scored, rewards, torch.inf), key)
    shifted = torch.where(scored, rewards - lowest[key], 0.0)
    mean = group_sum(shifted, key) / count.clamp(min=1)
    return torch.where(scored, shifted - mean[key], 0.0)


def group_std(centered: Tensor, key: Tensor, count: Tensor, ddof: int) -> Tensor:
    """Compute the standard deviation by group [K] of centered values; 0 for groups of fewer than two."""
    squares = group_sum(centered.square(), key)
    return torch.where(count > 1, squares / (count - ddof).clamp(min=1), 0.0).sqrt()
