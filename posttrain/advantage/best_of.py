"""Advantages for the best of several completions: pass@k as the training objective."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.advantage.group import number_groups, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.registry import register


@register("advantage", "pass_k_training", paper="2508.10751", needs=("groups",))
def pass_k_training(batch: RolloutBatch, *, k: int = 4) -> Tensor:
    """Compare the subsets of k rows of a group by their best reward; a row gets the mean of its subsets -> [N].

    Over all subsets of k scored rows, M is the largest reward of a subset, m its mean and s its standard deviation; the
    advantage of a row is (mean of M over the subsets with this row - m) / s. With rewards 0 and 1 this is the paper's
    formula: right rows get (1 - m) / s, wrong ones (1 - m - C(W-1,k-1) / C(n-1,k-1)) / s, where n = scored rows of the
    group, W = wrong ones, C = binomial coefficient, m = 1 - C(W,k) / C(n,k), s = sqrt(m (1 - m)). k 1 is `group` with
    ddof 0 and eps 0. Groups with fewer than k scored rows, or whose subsets all have the same best reward (fewer than k
    wrong rows), get 0.
    """
    return _by_group(batch, lambda rewards: _of_subsets(rewards, k))


@register("advantage", "best_of_group", paper="2503.19595", needs=("groups",))
def best_of_group(batch: RolloutBatch, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """Give the best row of a group its lead over the second best, and all other rows 0 -> [N] (verl: `grpo_passk`).

    This is max of the group minus the max without the row: pass@k for k the group's size, with a leave-one-out
    baseline. normalize: divide by (std of the group's scored rewards + eps), ddof 1, as verl does by default. A group
    whose best reward occurs twice, or with a single scored row, gets 0.
    """

    def lead(rewards: Tensor) -> Tensor:
        advantages = torch.zeros_like(rewards)
        if len(rewards) > 1:
            (best, second), rows = rewards.topk(2)
            advantages[rows[0]] = (best - second) / (rewards.std() + eps if normalize else 1.0)
        return advantages

    return _by_group(batch, lead)


def _of_subsets(rewards: Tensor, k: int) -> Tensor:
    """Return the advantages [n] of one group's rewards [n]; see `pass_k_training`.

    In ascending order, row j (from 0) is the best of C(j, k-1) subsets, and of C(j-1, k-2) that contain a given earlier
    row. The subsets that contain a row number C(n-1, k-1).
    """
    n = len(rewards)
    if n < k:
        return torch.zeros_like(rewards)
    order = rewards.argsort(stable=True)
    above = rewards[order] - rewards.min()  # equal rewards give exactly 0
    best = above.new_tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)])
    own = above.new_tensor([math.comb(j, k - 1) / math.comb(n - 1, k - 1) for j in range(n)])
    later = above.new_tensor(
        [math.comb(j - 1, k - 2) / math.comb(n - 1, k - 1) if j > 0 and k > 1 else 0 for j in range(n)]
    )
    mean = (best * above).sum()
    deviation = (best * (above - mean).square()).sum().sqrt()
    behind = (later * above).flip(0).cumsum(0).flip(0) - later * above
    advantages = torch.zeros_like(rewards)
    if deviation > 1e-6 * above.max():
        advantages[order] = (own * above + behind - mean) / deviation
    return advantages


def _by_group(batch: RolloutBatch, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of one group's scored rewards [n] -> [n] to all groups -> [N]; unscored rows get 0."""
    rewards = require_rewards(batch).detach()
    advantages, key = torch.zeros_like(rewards), number_groups(batch.group_ids)
    for number in range(int(key.max()) + 1 if len(key) else 0):
        rows = ((key == number) & ~rewards.isnan()).nonzero().squeeze(-1)
        if len(rows):
            advantages[rows] = function(rewards[rows])
    return advantages
