"""ADHint: rollouts that continue a hint and rollouts of the plain prompt in one group, whose rewards are not pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import centred_and_scaled, group_mean, joint, numbered, required, rewards_of
from posttrain.batch import RolloutBatch
from posttrain.registry import register

Variant = Literal["symmetric", "one_sided"]


@register(
    "advantage",
    "adhint",
    paper="2512.13095",
    needs=("groups", "hinted", "hint_mask"),
    note="Published is the idea, relative difficulty with and without hints; the factors are a reconstruction.",
)
def adhint(batch: RolloutBatch, *, variant: Variant = "symmetric", eps: float = 1e-6, ddof: int = 0) -> Tensor:
    """(reward - mean) / (std + eps) among the hinted and among the plain rows of a prompt, times a factor -> [N,T].

    D = clip(mean hinted reward - mean plain reward, 0, 1). symmetric: plain rows with A > 0 times 1 + D, with A < 0
    times 1 - D; hinted ones the other way round. one_sided: only the factors 1 + D. An unaided success where hints help
    is precious, a failure in spite of a hint telling. Hint tokens of rows with A < 0 get 0: a hint is never unlearnt.
    """
    hinted = required(batch.hinted, "hinted")
    values, _ = hint_advantages(rewards_of(batch), batch.group_ids, hinted.bool(), variant=variant, eps=eps, ddof=ddof)
    return protected(values, required(batch.hint_mask, "hint_mask"), batch.mask)


def hint_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    hinted: Tensor,
    *,
    variant: Variant = "symmetric",
    eps: float = 1e-6,
    ddof: int = 0,
) -> tuple[Tensor, Tensor]:
    """Row advantages [N] and the gap D [K] by group; a group without hinted or without plain rows has gap 0."""
    group = numbered(group_ids)
    plain, helped = (group_mean(torch.where(rows, rewards, torch.nan), group) for rows in (~hinted, hinted))
    both = _any(hinted & ~rewards.isnan(), group) & _any(~hinted & ~rewards.isnan(), group)
    gap = torch.where(both, (helped - plain).clamp(0, 1), 0.0)
    values = centred_and_scaled(rewards, joint(group, hinted.long()), eps=eps, ddof=ddof)
    telling = torch.where(hinted, values < 0, values > 0)
    damped = 1 - gap[group] if variant == "symmetric" else torch.ones_like(values)
    return values * torch.where(telling, 1 + gap[group], damped), gap


def _any(rows: Tensor, group: Tensor) -> Tensor:
    return group_mean(rows.double(), group) > 0


def protected(advantages: Tensor, hint_mask: Tensor, mask: Tensor) -> Tensor:
    """Row advantages [N] by token [N,T]: 0 outside the mask, and on the hint's tokens of rows with A < 0."""
    shielded = hint_mask.bool() & (advantages < 0)[:, None]
    return torch.where(mask & ~shielded, advantages[:, None], 0.0)


def hint_ratio(
    rewards_naive: Sequence[float | None], *, w_min: float = 0.0, w_max: float = 0.8, noise: float = 0.0
) -> float:
    """Share of the reference solution that is given away: clip((w_max - w_min) * difficulty + w_min + noise, 0, 1).

    difficulty = 1 - mean reward of the plain rollouts; without a scored one it is 1. w_max 0.8 is a guess.
    """
    scored = [r for r in rewards_naive if r is not None]
    difficulty = 1 - (sum(scored) / len(scored) if scored else 0.0)
    return min(max((w_max - w_min) * difficulty + w_min + noise, 0.0), 1.0)
