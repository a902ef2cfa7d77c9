"""Agents that say what they are doing: credit by checklist and turn (CM2), and by kind of step (RLVMR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.advantage.group import (
    by_trajectory,
    centred_and_scaled,
    group_sum,
    joint,
    number_groups,
    require_field,
    rewards_of,
)
from posttrain.advantage.steps import steps_of
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.registry import register


@register(
    "advantage",
    "per_turn",
    needs=("groups", "turn_ids", "token_rewards"),
    note="For rollouts whose turns have scores of their own; with fewer than min_group rollouts a turn has no signal.",
)
def per_turn(batch: RolloutBatch, *, min_group: int = 5, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """CM2: each turn is compared with the same turn of the prompt's other rollouts -> [N,T], one value a turn.

    `token_rewards` holds the turn scores (summed by turn). A = s - mean (/ (std + eps) with norm_std, unbiased) over
    the rollouts that reached the turn and could be scored; fewer than min_group of them give 0. Source: "CM2:
    Reinforcement Learning with Checklist Rewards for Multi-Turn and Multi-Step Agentic Tool Use".
    """
    turn = torch.where(batch.mask, require_field(batch.turn_ids, "turn_ids"), -1)
    width = int(turn.max()) + 1 if turn.numel() else 0
    rewards = torch.where(batch.mask, require_field(batch.token_rewards, "token_rewards"), 0.0)
    scores = rewards.new_zeros(len(batch), width).scatter_add(1, turn.clamp(min=0), rewards)
    reached = torch.stack([(turn == k).any(-1) for k in range(width)], dim=1) if width else scores.bool()
    failed = rewards_of(batch).isnan()
    return turn_terms(
        scores, reached, turn, batch.group_ids, failed, min_group=min_group, norm_std=norm_std, eps=eps
    ).advantages


@dataclass(frozen=True)
class TurnAdvantages:
    """turns [N,K] by turn, advantages [N,T] by token."""

    turns: Tensor
    advantages: Tensor


def turn_terms(
    scores: Tensor,
    reached: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    failed: Tensor | None = None,
    *,
    min_group: int = 5,
    norm_std: bool = False,
    eps: float = 1e-6,
) -> TurnAdvantages:
    """The advantages of `per_turn` from scores and reached [N,K], turn_ids [N,T] (-1: no turn) and failed [N]."""
    used = reached.bool() if failed is None else reached.bool() & ~failed.bool()[:, None]
    key = number_groups(group_ids)
    turns = torch.zeros_like(scores)
    for k in range(scores.shape[1]):
        values = torch.where(used[:, k], scores[:, k], torch.nan)
        enough = group_sum(used[:, k].to(scores.dtype), key) >= min_group
        found = centred_and_scaled(values, group_ids, scale="group" if norm_std else "none", eps=eps)
        turns[:, k] = torch.where(enough[key], found, 0.0)
    if not scores.shape[1]:
        return TurnAdvantages(turns, scores.new_zeros(turn_ids.shape))
    spread = turns.gather(1, turn_ids.long().clamp(min=0))
    return TurnAdvantages(turns, torch.where(turn_ids >= 0, spread, 0.0))


@register(
    "advantage",
    "meta_reasoning",
    paper="2507.22844",
    needs=("groups", "turn_ids", "turn_scores"),
    note="`tag` and `step_reward` are rewards by turn, as in turns.py; the released scripts use weights 0.5 and 1.",
)
def meta_reasoning(
    batch: RolloutBatch,
    *,
    tag: str = "meta_tag",
    step_reward: str = "meta_reward",
    weight: float = 0.5,
    norm_std: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """RLVMR: how good the episode was, and how good the turn was for its kind -> [N,T], one value a turn.

    The row's reward less the mean over the prompt's rollouts, + weight * (the turn's `step_reward` less its mean over
    all turns of the prompt with the same `tag`). norm_std: each also / (std + eps), unbiased. What
    is alone keeps its raw value; a turn with a negative tag has no second part.
    """
    steps = steps_of(batch)
    found = meta_terms(steps.batch, tag=tag, step_reward=step_reward, weight=weight, norm_std=norm_std, eps=eps)
    return steps.spread(found)


def meta_terms(
    batch: RolloutBatch,
    *,
    tag: str = "meta_tag",
    step_reward: str = "meta_reward",
    weight: float = 0.5,
    norm_std: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """The advantages of `meta_reasoning` [N], of rows that are steps, marked with their trajectory. A step with a
    negative or missing component `tag` has no second part.

    Raises UserError for a batch without the two components.
    """
    if missing := [name for name in (tag, step_reward) if name not in batch.components]:
        raise UserError(f"the batch has no reward component {' and no '.join(f'`{name}`' for name in missing)}")
    scaling: dict[str, Any] = {"scale": "group" if norm_std else "none", "eps": eps, "singleton": "raw"}
    trajectories = require_field(batch.trajectory_ids, "trajectory_ids")
    episode = by_trajectory(rewards_of(batch), batch.group_ids, trajectories, **scaling)
    kinds = batch.components[tag].double().nan_to_num(nan=-1.0).long()
    known = (kinds >= 0) & ~rewards_of(batch).isnan()
    rewards = torch.where(known, batch.components[step_reward].to(episode.dtype), torch.nan)
    return episode + weight * centred_and_scaled(rewards, joint(batch.group_ids, kinds), **scaling)
