"""BNPO: advantages normalised by a Beta density that is fitted to the pass rates of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.advantage.group import group_mean, group_sum, number_groups, rewards_of
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.registry import register

ROUNDING = 1e-6


@register(
    "advantage",
    "beta_norm",
    paper="2506.02864",
    needs=("groups",),
    note=(
        "The cap on the weight (the code has none and gives NaN where a group is all right or all wrong) and weight 1"
        " for equal pass rates are not the paper's. Each of several rewards normalised by itself is not built."
    ),
)
def beta_norm(
    batch: RolloutBatch, *, reward_min: float = 0.0, reward_max: float = 1.0, weight_max: float = 1e6
) -> Tensor:
    """(R - p) / f(p; alpha, beta) -> [N]; R in [0, 1], p the mean of the group, f a Beta density. See
    `beta_normalised`.

    alpha = beta = 1 is plain centring, 3/2 is division by the std up to a constant; between them the spread of the pass
    rates decides. Rewards are scaled by (R - reward_min) / (reward_max - reward_min); one outside of that range has no
    place in a Beta density and is refused, so a penalty below 0 needs a lower reward_min. BNPO, not TRL's `bnpo`.
    """
    return beta_normalised(batch, reward_min=reward_min, reward_max=reward_max, weight_max=weight_max).advantages


@dataclass(frozen=True)
class BetaNormalised:
    """advantages [N]; weights [K] by group number in rising order of the ids; alpha and beta of the density."""

    advantages: Tensor
    weights: Tensor
    alpha: Tensor
    beta: Tensor


def beta_normalised(
    batch: RolloutBatch, *, reward_min: float = 0.0, reward_max: float = 1.0, weight_max: float = 1e6
) -> BetaNormalised:
    """The advantages of `beta_norm` and how they came about.

    Over the groups mu = mean(p), var = var(p), unbiased; s = mu (1 - mu) / var - 1; alpha = max(1 + s mu / 3, 1), beta
    = max(1 + s (1 - mu) / 3, 1). Weight = min(1 / f(p), weight_max); 1 for one group, or without variance. Unscored
    rows are left out and get 0, and so does a row whose group has no other scored one. A group of one row has p = 0, as
    in the authors' code: its advantage is R / f(0). Raises UserError for rewards outside of the given range.
    """
    rewards = (rewards_of(batch).detach() - reward_min) / (reward_max - reward_min)
    key = number_groups(batch.group_ids)
    scored = ~rewards.isnan()
    if bool(((rewards < -ROUNDING) | (rewards > 1 + ROUNDING)).any()):  # NaN is neither
        seen = rewards_of(batch)[scored]
        raise UserError(
            f"beta_norm has rewards from {float(seen.min()):g} to {float(seen.max()):g}",
            allowed=f"from advantage.reward_min {reward_min:g} to advantage.reward_max {reward_max:g}",
            hint="write the range that the rewards have after group_rewards, weights and a KL in the reward",
        )
    count, size = (group_sum(rows.to(rewards.dtype), key) for rows in (scored, torch.ones_like(scored)))
    p = torch.where(size > 1, group_mean(rewards, key), 0.0).clamp(0, 1)  # a sum of weights is 1 but for rounding
    alpha, beta = _fit(p[count > 0])
    log_density = (alpha - 1) * _log(p, alpha) + (beta - 1) * _log(1 - p, beta)
    log_density = log_density + torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    weights = (-log_density).exp().clamp(max=weight_max)
    advantages = torch.where(scored, (rewards - p[key]) * weights[key], 0.0)
    return BetaNormalised(advantages, weights, alpha, beta)


def _fit(p: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and beta from the pass rates [K] of the groups."""
    one = p.new_ones(())
    if len(p) < 2 or p.max() == p.min():
        return one, one
    mean, variance = p.mean(), p.var()
    strength = mean * (1 - mean) / variance - 1
    return torch.maximum(1 + strength * mean / 3, one), torch.maximum(1 + strength * (1 - mean) / 3, one)


def _log(x: Tensor, exponent: Tensor) -> Tensor:
    """log x, or 0 where the exponent makes x^(exponent - 1) 1 whatever x is (0 * -inf is NaN)."""
    return torch.where(exponent > 1, x.log(), 0.0)
