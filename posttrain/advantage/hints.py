"""ADHint: rollouts that continue a hint and rollouts of the plain prompt in one group, whose rewards are not pooled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import centred_and_scaled, group_mean, joint, number_groups, require_field, rewards_of
from posttrain.batch import RolloutBatch, row_mean
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
    hinted = require_field(batch.hinted, "hinted")
    values, _ = hint_advantages(rewards_of(batch), batch.group_ids, hinted.bool(), variant=variant, eps=eps, ddof=ddof)
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
    """Row advantages [N] and the gap D [K] by group; a group without hinted or without plain rows has gap 0."""
    group = number_groups(group_ids)
    plain, helped = (group_mean(torch.where(rows, rewards, torch.nan), group) for rows in (~hinted, hinted))
    both = _any(hinted & ~rewards.isnan(), group) & _any(~hinted & ~rewards.isnan(), group)
    gap = torch.where(both, (helped - plain).clamp(0, 1), 0.0)
    values = centred_and_scaled(rewards, joint(group, hinted.long()), eps=eps, ddof=ddof)
    telling = torch.where(hinted, values < 0, values > 0)
    damped = 1 - gap[group] if variant == "symmetric" else torch.ones_like(values)
    return values * torch.where(telling, 1 + gap[group], damped), gap


def _any(rows: Tensor, group: Tensor) -> Tensor:
    return group_mean(rows.double(), group) > 0


def protect_hint_tokens(advantages: Tensor, hint_mask: Tensor, mask: Tensor) -> Tensor:
    """Row advantages [N] by token [N,T]: 0 outside the mask, and on the hint's tokens of rows with A < 0."""
    shielded = hint_mask.bool() & (advantages < 0)[:, None]
    return torch.where(mask & ~shielded, advantages[:, None], 0.0)


@register(
    "factor",
    "hint_consistency",
    paper="2512.13095",
    needs=("hinted", "hint_mask", "entropy"),
    note="Published is that hint tokens whose entropy departs from the continuation's are damped; the form is a guess.",
)
def hint_consistency(batch: RolloutBatch) -> Tensor:
    """ADHint's weights of tokens [N,T]: those of a hint min(H, H') / max(H, H'), H' the continuation's mean entropy.

    1 where both are below 1e-8, 0 in rows with a negative advantage, whose hint must not be pushed down. The row's own
    tokens weigh 1.
    """
    advantages = require_field(batch.advantages, "advantages")
    rows = advantages if advantages.dim() == 1 else own_advantages(batch, advantages)
    hints = require_field(batch.hint_mask, "hint_mask").bool()
    return hint_weights(require_field(batch.entropy, "entropy"), hints, batch.mask, rows)


def own_advantages(batch: RolloutBatch, advantages: Tensor) -> Tensor:
    """Row advantages [N] of token ones: those of the tokens that the policy sampled."""
    own = batch.mask & ~require_field(batch.hint_mask, "hint_mask").bool()
    return row_mean(advantages, own)


def hint_weights(entropy: Tensor, hint_mask: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """`hint_consistency` of row advantages [N]; 0 outside hint and mask."""
    hint_mask = hint_mask.bool()
    own = mask.bool() & ~hint_mask
    usual = row_mean(entropy, own)[:, None]
    low, high = torch.minimum(entropy, usual), torch.maximum(entropy, usual)
    near = torch.where(high < 1e-8, 1.0, low / high.clamp(min=1e-8))
    near = torch.where((advantages < 0)[:, None], 0.0, near)
    return torch.where(hint_mask, near, own.to(entropy.dtype))
