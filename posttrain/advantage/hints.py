"""ADHint: advantages for groups of hinted and plain rollouts, which are normalized separately."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import (
    combine_ids,
    group_mean,
    normalize_by_group,
    number_groups,
    require_field,
    require_rewards,
)
from posttrain.batch import RolloutBatch, row_mean
from posttrain.registry import register

Variant = Literal["symmetric", "one_sided"]


@register(
    "advantage",
    "adhint",
    paper="2512.13095",
    needs=("groups", "hinted", "hint_mask"),
    note="The paper gives the idea, relative difficulty with and without hints; the factors are a reconstruction.",
)
def adhint(batch: RolloutBatch, *, variant: Variant = "symmetric", eps: float = 1e-6, ddof: int = 0) -> Tensor:
    """Normalize hinted and plain rows of a prompt separately, times a factor of how much the hint helps -> [N,T].

    (reward - mean) / (std + eps), and D = clip(mean hinted reward - mean plain reward, 0, 1). symmetric: plain rows
    with A > 0 times 1 + D, with A < 0 times 1 - D; hinted rows the other way round. one_sided: only the factors 1 + D.
    Where hints help, an unaided success and a failure despite a hint carry the most information. Hint tokens of rows
    with A < 0 get 0, so a hint is never pushed down.
    """
    hinted = require_field(batch.hinted, "hinted")
    values, _ = hint_advantages(
        require_rewards(batch), batch.group_ids, hinted.bool(), variant=variant, eps=eps, ddof=ddof
    )
    return protect_hint_tokens(values, require_field(batch.hint_mask, "hint_mask"), batch.mask)


def hint_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    hinted: Tensor,
    *,
    variant: Variant = "symmetric",
    eps: float = 1e-6,
    ddof: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute row advantages [N] and the gap D [K] by group; a group without hinted or without plain rows has gap 0."""
    group = number_groups(group_ids)
    plain, helped = (group_mean(torch.where(rows, rewards, torch.nan), group) for rows in (~hinted, hinted))
    both = _any_in_group(hinted & ~rewards.isnan(), group) & _any_in_group(~hinted & ~rewards.isnan(), group)
    gap = torch.where(both, (helped - plain).clamp(0, 1), 0.0)
    values = normalize_by_group(rewards, combine_ids(group, hinted.long()), eps=eps, ddof=ddof)
    amplified = torch.where(hinted, values < 0, values > 0)
    damped = 1 - gap[group] if variant == "symmetric" else torch.ones_like(values)
    return values * torch.where(amplified, 1 + gap[group], damped), gap


def _any_in_group(rows: Tensor, group: Tensor) -> Tensor:
    """Return the groups [K] in which any of the rows [N] is True."""
    return group_mean(rows.double(), group) > 0


def protect_hint_tokens(advantages: Tensor, hint_mask: Tensor, mask: Tensor) -> Tensor:
    """Expand row advantages [N] to tokens [N,T]: 0 outside the mask and on the hint tokens of rows with A < 0."""
    shielded = hint_mask.bool() & (advantages < 0)[:, None]
    return torch.where(mask & ~shielded, advantages[:, None], 0.0)


@register(
    "factor",
    "hint_consistency",
    paper="2512.13095",
    needs=("hinted", "hint_mask", "entropy"),
    note="The paper damps hint tokens whose entropy departs from the continuation's; the formula is a guess.",
)
def hint_consistency(batch: RolloutBatch) -> Tensor:
    """Weight hint tokens by how close their entropy is to the continuation's; other tokens by 1 -> [N,T] (ADHint).

    min(H, H') / max(H, H'), H the token's entropy, H' the continuation's mean entropy. The weight is 1 if both
    entropies are below 1e-8, and 0 in rows with a negative advantage, whose hint must not be pushed down.
    """
    advantages = require_field(batch.advantages, "advantages")
    rows = advantages if advantages.dim() == 1 else sampled_token_advantages(batch, advantages)
    hints = require_field(batch.hint_mask, "hint_mask").bool()
    return hint_weights(require_field(batch.entropy, "entropy"), hints, batch.mask, rows)


def sampled_token_advantages(batch: RolloutBatch, advantages: Tensor) -> Tensor:
    """Average token advantages over the sampled tokens of each row, without the hint [N]."""
    sampled = batch.mask & ~require_field(batch.hint_mask, "hint_mask").bool()
    return row_mean(advantages, sampled)


def hint_weights(entropy: Tensor, hint_mask: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Compute the weights of `hint_consistency` [N,T] from row advantages [N]; 0 outside hint and mask."""
    hint_mask = hint_mask.bool()
    sampled = mask.bool() & ~hint_mask
    mean_entropy = row_mean(entropy, sampled)[:, None]
    low, high = torch.minimum(entropy, mean_entropy), torch.maximum(entropy, mean_entropy)
    weight = torch.where(high < 1e-8, 1.0, low / high.clamp(min=1e-8))
    weight = torch.where((advantages < 0)[:, None], 0.0, weight)
    return torch.where(hint_mask, weight, sampled.to(entropy.dtype))
