"""Rollouts of which a window of tokens is there so far: T-PPO's advantages (arXiv 2506.15050)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """advantages [N,T]; policy_mask: tokens of this window; value_targets and value_mask: of finished rows alone."""

    advantages: Tensor
    policy_mask: Tensor
    value_targets: Tensor
    value_mask: Tensor


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
