"""Advantages shared by the training rows of one rollout: its chunks, stretches between summaries, or calls by role."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.advantage.group import normalize_by_group, require_rewards, sort_by_rollout
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.registry import register


class SharedAdvantages(NamedTuple):
    """Advantages of rollouts and of their rows. rollouts, weight [N]: by rollout; rows [M]: by training row."""

    rollouts: Tensor
    weight: Tensor
    rows: Tensor


def normalize_shared_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    row_counts: Tensor,
    finished: Tensor | None = None,
    *,
    norm_std: bool = True,
    eps: float = 1e-6,
    overlong_mask: bool = True,
) -> SharedAdvantages:
    """Normalize rewards over rollouts, not rows, and give the result to all rows of a rollout (SUPO, arXiv 2510.06727).

    rewards, group_ids, row_counts, finished: [N] rollouts; row_counts: how many training rows a rollout has, in order.
    (reward - mean) / (std + eps) with ddof 1. overlong_mask: an unfinished rollout has weight 0, and its reward stays
    in the mean.
    """
    advantages = normalize_by_group(rewards, group_ids, scale="group" if norm_std else "none", eps=eps, ddof=1)
    weight = torch.ones_like(rewards) if finished is None or not overlong_mask else finished.to(rewards)
    return SharedAdvantages(advantages, weight, (advantages * weight).repeat_interleave(row_counts))


@register("advantage", "trajectory", paper="2510.06727", needs=("groups", "trajectory_ids", "step_ids"))
def normalize_rollouts(
    batch: RolloutBatch, *, norm_std: bool = True, eps: float = 1e-6, overlong_mask: bool = False
) -> Tensor:
    """Normalize the reward of each rollout within its group and give it to all of its rows -> [N] (`rollout.shape`).

    (reward - mean) / (std + eps). A rollout counts once in mean and std (ddof 1), however many rows it has; its reward
    is that of its last row. A rollout without a reward is excluded and gets 0. norm_std false: no division.
    overlong_mask (SUPO): an unfinished rollout gets 0, and its reward stays in the mean. Raises AssertionError for a
    batch without trajectory_ids.
    """
    assert batch.trajectory_ids is not None and batch.step_ids is not None
    rewards = require_rewards(batch)
    order, last, counts = sort_by_rollout(batch.trajectory_ids, batch.step_ids)
    finished = None if batch.truncated is None else ~batch.truncated[last]
    groups = batch.group_ids if batch.prompt_ids is None else batch.prompt_ids
    shared = normalize_shared_rewards(
        rewards[last], groups[last], counts, finished, norm_std=norm_std, eps=eps, overlong_mask=overlong_mask
    )
    return torch.zeros_like(rewards).scatter(0, order, shared.rows)


@register("advantage", "from_role", needs=("agent_ids", "roles", "trajectory_ids", "step_ids"))
def normalize_role_calls(batch: RolloutBatch, *, role: str = "planner", eps: float = 1e-6) -> Tensor:
    """Normalize the rewards of one role's calls and give them to all calls of the same rollout -> [N]. Source: CoDA.

    (reward - mean) / (std + eps). Of several calls of the role the last one counts; mean and std are over the group's
    calls of this role, so the number of other calls does not matter. A group of one gets its reward. A rollout without
    a call of the role gets 0. Raises UserError for a role that no call of the batch has.
    """
    assert batch.trajectory_ids is not None and batch.step_ids is not None and batch.agent_ids is not None
    if role not in batch.roles:
        called = ", ".join(batch.roles)
        raise UserError(f"advantage `from_role`: no call of a role `{role}` is trained on", allowed=called)
    leads = batch.agent_ids == batch.roles.index(role)
    role_last = batch.step_ids + leads * (batch.step_ids.max() + 1)  # the role's calls come after all others
    order, last, counts = sort_by_rollout(batch.trajectory_ids, role_last)
    rewards = torch.where(leads[last], require_rewards(batch)[last], torch.nan)
    shared = normalize_planner_rewards(rewards, batch.group_ids[last], counts, eps=eps)
    return torch.zeros_like(shared.rows).scatter(0, order, shared.rows)


def normalize_planner_rewards(
    rewards: Tensor, group_ids: Tensor, executors: Tensor, *, eps: float = 1e-6
) -> SharedAdvantages:
    """Normalize the planners' rewards and give the executors of a rollout their planner's advantage (CoDA).

    rewards, group_ids, executors (how many a rollout has): [N] rollouts. rows: of all executors, in order. (reward -
    mean) / (std + eps) with ddof 1; a group of one has mean 0 and std 1. The number of executors does not matter.
    """
    advantages = normalize_by_group(rewards, group_ids, eps=eps, ddof=1, singleton="raw")
    return SharedAdvantages(advantages, torch.ones_like(rewards), advantages.repeat_interleave(executors))
