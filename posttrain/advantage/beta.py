"""BNPO: advantages normalized by a Beta density fitted to the pass rates of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.advantage.group import group_mean, group_sum, number_groups, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.registry import register

RANGE_TOLERANCE = 1e-6


@register(
    "advantage",
    "beta_norm",
    paper="2506.02864",
    needs=("groups",),
    note=(
        "The cap on the weight (the code has none and gives NaN where a group is all right or all wrong) and weight 1"
        " for equal pass rates are not the paper's. Normalising several rewards separately is not built."
    ),
)
def beta_norm(
    batch: RolloutBatch, *, reward_min: float = 0.0, reward_max: float = 1.0, weight_max: float = 1e6
) -> Tensor:
    """Normalize rewards by a Beta density of the group's pass rate -> [N] (BNPO).

    (R - p) / f(p; alpha, beta), f the density, R in [0, 1] and p the mean of the group. alpha = beta = 1 is plain
    centering, 3/2 is division by the std up to a constant; the spread of the pass rates decides where between the two
    the batch lies. Rewards are scaled by (R - reward_min) / (reward_max - reward_min). A reward outside of that range
    has no Beta density and is refused, so a penalty below 0 needs a lower reward_min. This is BNPO, not TRL's `bnpo`.
    See `beta_normalized`.
    """
    return beta_normalized(batch, reward_min=reward_min, reward_max=reward_max, weight_max=weight_max).advantages


@dataclass(frozen=True)
class BetaNormalized:
    """Result of `beta_normalized`.

    advantages [N]; weights [K] by group, in ascending order of the group ids; alpha and beta of the density.
    """

    advantages: Tensor
    weights: Tensor
    alpha: Tensor
    beta: Tensor


def beta_normalized(
    batch: RolloutBatch, *, reward_min: float = 0.0, reward_max: float = 1.0, weight_max: float = 1e6
) -> BetaNormalized:
    """Compute the advantages of `beta_norm`, with the group weights and the parameters of the fitted density.

    Over the groups mu = mean(p), var = var(p), unbiased; s = mu (1 - mu) / var - 1; alpha = max(1 + s mu / 3, 1), beta
    = max(1 + s (1 - mu) / 3, 1). Weight = min(1 / f(p), weight_max); 1 for a single group, or without variance.
    Unscored rows are excluded and get 0, as does a row whose group has no other scored row. A group of one row has p =
    0, as in the authors' code: its advantage is R / f(0). Raises UserError for rewards outside of the given range.
    """
    rewards = (require_rewards(batch).detach() - reward_min) / (reward_max - reward_min)
    key = number_groups(batch.group_ids)
    scored = ~rewards.isnan()
    if bool(((rewards < -RANGE_TOLERANCE) | (rewards > 1 + RANGE_TOLERANCE)).any()):  # NaN is neither
        seen = require_rewards(batch)[scored]
        raise UserError(
            f"beta_norm has rewards from {float(seen.min()):g} to {float(seen.max()):g}",
            allowed=f"from advantage.reward_min {reward_min:g} to advantage.reward_max {reward_max:g}",
            hint="write the range that the rewards have after group_rewards, weights and a KL in the reward",
        )
    count, size = (group_sum(rows.to(rewards.dtype), key) for rows in (scored, torch.ones_like(scored)))
    p = torch.where(size > 1, group_mean(rewards, key), 0.0).clamp(0, 1)  # the clamp removes rounding
    alpha, beta = _fit_beta(p[count > 0])
    log_density = (alpha - 1) * _log_if_used(p, alpha) + (beta - 1) * _log_if_used(1 - p, beta)
    log_density = log_density + torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    weights = (-log_density).exp().clamp(max=weight_max)
    advantages = torch.where(scored, (rewards - p[key]) * weights[key], 0.0)
    return BetaNormalized(advantages, weights, alpha, beta)


def _fit_beta(p: Tensor) -> tuple[Tensor, Tensor]:
    """Fit alpha and beta to the pass rates [K] of the groups."""
    one = p.new_ones(())
    if len(p) < 2 or p.max() == p.min():
        return one, one
    mean, variance = p.mean(), p.var()
    strength = mean * (1 - mean) / variance - 1
    return torch.maximum(1 + strength * mean / 3, one), torch.maximum(1 + strength * (1 - mean) / 3, one)


def _log_if_used(x: Tensor, exponent: Tensor) -> Tensor:
    """Return log x, or 0 where the exponent makes x^(exponent - 1) equal 1 for every x (0 * -inf is NaN)."""
    return torch.where(exponent > 1, x.log(), 0.0)
