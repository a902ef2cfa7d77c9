"""Advantages from per-turn scores: checklist scores by turn (CM2) and step rewards by kind of step (RLVMR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.advantage.group import (
    combine_ids,
    group_sum,
    normalize_by_group,
    normalize_by_trajectory,
    number_groups,
    require_field,
    require_rewards,
)
from posttrain.advantage.steps import split_into_steps
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.registry import register


@register(
    "advantage",
    "per_turn",
    needs=("groups", "turn_ids", "token_rewards"),
    note="For rollouts with scores by turn; a turn that fewer than min_group rollouts reached has no signal.",
)
def per_turn(batch: RolloutBatch, *, min_group: int = 5, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """Compare each turn with the same turn of the prompt's other rollouts (CM2) -> [N,T], one value per turn.

    `token_rewards` holds the turn scores (summed by turn). A = s - mean (/ (std + eps) with norm_std, unbiased), s: the
    turn's score, over the scored rollouts that reached the turn; fewer than min_group such rollouts give 0. Source:
    "CM2: Reinforcement Learning with Checklist Rewards for Multi-Turn and Multi-Step Agentic Tool Use".
    """
    turn = torch.where(batch.mask, require_field(batch.turn_ids, "turn_ids"), -1)
    width = int(turn.max()) + 1 if turn.numel() else 0
    rewards = torch.where(batch.mask, require_field(batch.token_rewards, "token_rewards"), 0.0)
    scores = rewards.new_zeros(len(batch), width).scatter_add(1, turn.clamp(min=0), rewards)
    reached = torch.stack([(turn == k).any(-1) for k in range(width)], dim=1) if width else scores.bool()
    failed = require_rewards(batch).isnan()
    return turn_terms(
        scores, reached, turn, batch.group_ids, failed, min_group=min_group, norm_std=norm_std, eps=eps
    ).advantages


@dataclass(frozen=True)
class TurnAdvantages:
    """Advantages [N,K] by turn (`turns`) and [N,T] by token (`advantages`)."""

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
    """Compute the advantages of `per_turn`.

    scores, reached [N,K]; turn_ids [N,T], -1: no turn; failed [N]: rows without a score.
    """
    used = reached.bool() if failed is None else reached.bool() & ~failed.bool()[:, None]
    key = number_groups(group_ids)
    turns = torch.zeros_like(scores)
    for k in range(scores.shape[1]):
        values = torch.where(used[:, k], scores[:, k], torch.nan)
        enough = group_sum(used[:, k].to(scores.dtype), key) >= min_group
        found = normalize_by_group(values, group_ids, scale="group" if norm_std else "none", eps=eps)
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
    """Add the episode's advantage and the turn's advantage among turns of its kind -> [N,T] (RLVMR).

    One value per turn.

    Episode: the row's reward minus the mean over the prompt's rollouts. Turn: weight * (the turn's `step_reward` minus
    its mean over all turns of the prompt with the same `tag`). norm_std: each part is also divided by (std + eps),
    unbiased. A single rollout, or a single turn of its kind, keeps its raw value. A turn with a negative tag has no
    turn part.
    """
    steps = split_into_steps(batch)
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
    """Compute the advantages of `meta_reasoning` [N] from rows that are steps with trajectory_ids.

    A step with a negative or missing component `tag` has no turn part. Raises UserError for a batch without the two
    components.
    """
    if missing := [name for name in (tag, step_reward) if name not in batch.components]:
        raise UserError(f"the batch has no reward component {' and no '.join(f'`{name}`' for name in missing)}")
    scaling: dict[str, Any] = {"scale": "group" if norm_std else "none", "eps": eps, "singleton": "raw"}
    trajectories = require_field(batch.trajectory_ids, "trajectory_ids")
    episode = normalize_by_trajectory(require_rewards(batch), batch.group_ids, trajectories, **scaling)
    kinds = batch.components[tag].double().nan_to_num(nan=-1.0).long()
    known = (kinds >= 0) & ~require_rewards(batch).isnan()
    rewards = torch.where(known, batch.components[step_reward].to(episode.dtype), torch.nan)
    return episode + weight * normalize_by_group(rewards, combine_ids(batch.group_ids, kinds), **scaling)
