"""Advantages for rollouts of which only a window of tokens has been sampled so far: T-PPO (arXiv 2506.15050)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.advantage.group import require_field, require_rewards
from posttrain.advantage.tokens import token_rewards, whiten_values
from posttrain.batch import Credit, RolloutBatch
from posttrain.registry import register


class WindowTargets(NamedTuple):
    """Targets of T-PPO, all [N,T].

    advantages; policy_mask: tokens of this window; value_targets and value_mask: of finished rows only.
    """

    advantages: Tensor
    policy_mask: Tensor
    value_targets: Tensor
    value_mask: Tensor


@register("advantage", "extended_gae", paper="2506.15050", needs=("values", "finished", "new_tokens"))
def advantage_of_window(batch: RolloutBatch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> Credit:
    """Compute generalized advantages of this step's tokens, for finished and unfinished rollouts -> [N,T] (T-PPO).

    For `rollout.shape: windows`. Tokens of earlier steps get 0. The state after an unfinished rollout has the value of
    its last state; see `extended_gae`. The critic learns from all tokens of finished rollouts only: the returns of
    other rollouts are NaN. whiten: (A - mean) / sqrt(variance + 1e-8) over this step's trained tokens. A finished row
    without a reward is excluded. Raises ValueError for a batch without `finished`.
    """
    finished = require_field(batch.finished, "finished")
    mask = batch.mask & ~(finished & require_rewards(batch).isnan())[:, None]
    found = extended_gae(
        torch.where(mask, token_rewards(batch), 0.0).nan_to_num(nan=0.0),
        require_field(batch.values, "values").double(),
        mask,
        finished,
        require_field(batch.new_tokens, "new_tokens"),
        gamma=gamma,
        lam=lam,
    )
    current = found.policy_mask.bool()
    advantages = torch.where(current, found.advantages, 0.0)
    returns = torch.where(found.value_mask.bool(), found.value_targets, torch.nan)
    return Credit(whiten_values(advantages, current, whitening="verl") if whiten else advantages, returns)


def extended_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, finished: Tensor, new_tokens: Tensor, *, gamma: float = 1.0,
    lam: float = 0.95,
) -> WindowTargets:  # fmt: skip
    """Compute generalized advantages of unfinished rows, assuming that the next state has the value of the last one.

    rewards, values, mask, new_tokens [N,T]; finished [N]. The state after the last token has value 0 if the row is
    finished, else V of its last token. Value targets are Monte-Carlo returns. With zeros for values unfinished rows
    give no signal: warm up the critic on finished ones.
    """
    trained, done = mask.bool(), finished.bool()
    advantages, targets = torch.zeros_like(values), torch.zeros_like(values)
    running, returns = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    after, reached = torch.zeros_like(values[:, 0]), torch.zeros_like(done)
    for t in reversed(range(values.shape[1])):
        here = trained[:, t]
        value = torch.where(here, values[:, t], 0.0)
        reward = torch.where(here, rewards[:, t], 0.0)
        following = torch.where(reached, after, torch.where(done, 0.0, value))
        delta = reward + gamma * following - value
        running = torch.where(here, delta + gamma * lam * running, running)
        returns = torch.where(here, reward + gamma * returns, returns)
        advantages[:, t] = torch.where(here, running, 0.0)
        targets[:, t] = torch.where(here & done, returns, 0.0)
        after, reached = torch.where(here, value, after), reached | here
    policy = trained & new_tokens.bool()
    return WindowTargets(advantages, policy.to(values), targets, (trained & done[:, None]).to(values))
