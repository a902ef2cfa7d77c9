"""Rollouts of which a window of tokens is there so far: T-PPO's advantages (arXiv 2506.15050)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.advantage.group import require_field, rewards_of
from posttrain.advantage.tokens import token_rewards, whiten_values
from posttrain.batch import Credit, RolloutBatch
from posttrain.registry import register


class Window(NamedTuple):
    """advantages [N,T]; policy_mask: tokens of this window; value_targets and value_mask: of finished rows alone."""

    advantages: Tensor
    policy_mask: Tensor
    value_targets: Tensor
    value_mask: Tensor


@register("advantage", "extended_gae", paper="2506.15050", needs=("values", "finished", "new_tokens"))
def advantage_of_window(batch: RolloutBatch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> Credit:
    """T-PPO: generalised advantages of this step's tokens, of finished rollouts and of those that go on -> [N,T]
    (`rollout.shape: windows`); 0 at tokens of earlier steps.

    The state behind an unfinished rollout is worth what its last one is; see `extended_gae`. The critic learns from
    finished rollouts alone, all their tokens: the returns of others are NaN. whiten: (A - mean) / sqrt(variance + 1e-8)
    over this step's trained tokens. A finished row without a reward is left out. Raises ValueError for a batch that
    does not say what is finished.
    """
    finished = require_field(batch.finished, "finished")
    mask = batch.mask & ~(finished & rewards_of(batch).isnan())[:, None]
    found = extended_gae(
        torch.where(mask, token_rewards(batch), 0.0).nan_to_num(nan=0.0),
        require_field(batch.values, "values").double(),
        mask,
        finished,
        require_field(batch.new_tokens, "new_tokens"),
        gamma=gamma,
        lam=lam,
    )
    mine = found.policy_mask.bool()
    advantages = torch.where(mine, found.advantages, 0.0)
    returns = torch.where(found.value_mask.bool(), found.value_targets, torch.nan)
    return Credit(whiten_values(advantages, mine, whitening="verl") if whiten else advantages, returns)


def extended_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, finished: Tensor, new_tokens: Tensor, *, gamma: float = 1.0,
    lam: float = 0.95,
) -> Window:  # fmt: skip
    """Generalised advantages of unfinished rows, whose next state is taken to be worth what their last one is.

    rewards, values, mask, new_tokens [N,T]; finished [N]. The state after the last token is worth 0 if the row is
    finished, else V of its last token. Value targets are Monte-Carlo returns. With zeros for values unfinished rows
    give no signal: warm the critic up on finished ones.
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
    return Window(advantages, policy.to(values), targets, (trained & done[:, None]).to(values))
