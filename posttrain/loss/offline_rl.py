"""Learning from stored traces by step or token: soft Bellman residuals, direct advantages, DPO's credit by token.

N rows, T tokens, S steps; cells where a mask is 0 may hold anything and never matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Oreo(NamedTuple):
    """Both losses [] have one value and different gradients; `residual` [N,T] is constant."""

    value_loss: Tensor
    policy_loss: Tensor
    residual: Tensor


def oreo(logp: Tensor, ref_logp: Tensor, values: Tensor, rewards: Tensor, mask: Tensor, *, beta: float = 0.03) -> Oreo:
    """OREO (arXiv 2412.16145): d_t = V(s_t) - R + beta sum_{i >= t} u_i, u = logp - ref_logp, V before token t, R [N].

    Both losses are the mean over rows of a row's mean of d_t^2. The value loss sees log-probs as constants; the policy
    loss sees V and the later tokens as constants, so its gradient by logp_t is 2 beta d_t / (length N). An empty row
    gives 0. For step level pass sums over steps. Update the value first.
    """
    u = torch.where(mask, logp - ref_logp.detach(), 0.0)
    tail = u.detach().flip(-1).cumsum(-1).flip(-1)
    fixed = torch.where(mask, values - rewards[:, None] + beta * tail, 0.0)
    own = torch.where(mask, fixed.detach() + beta * (u - u.detach()), 0.0)
    return Oreo(_row_means(fixed.square(), mask), _row_means(own.square(), mask), fixed.detach())


def oreo_response(
    logp: Tensor, ref_logp: Tensor, value0: Tensor, rewards: Tensor, mask: Tensor, *, beta: float = 0.03
) -> Tensor:
    """OREO with one residual a row, at its start: mean of (V(s_0) - R + beta sum u)^2; V(s_0) and R are [N]."""
    u = torch.where(mask, logp - ref_logp.detach(), 0.0).sum(-1)
    return (value0 - rewards + beta * u).square().sum() / max(len(rewards), 1)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over rows of the mean over a row's trained cells; an empty row is 0."""
    rows = torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    return rows.sum() / max(len(values), 1)


class StepAdvantages(NamedTuple):
    loss: Tensor  # []
    advantages: Tensor  # [N,S] constant


def direct_advantage(
    step_logps: Tensor,
    step_ref_logps: Tensor,
    values: Tensor,
    final_rewards: Tensor,
    step_mask: Tensor,
    *,
    beta: float = 0.1,
) -> StepAdvantages:
    """Direct advantage policy optimisation (arXiv 2412.18279): half the mean over steps of (u_s - A_s / beta)^2.

    u_s = log-ratio of a step's tokens to the policy that wrote them. A_s = V(next state) - V(state), values [N,S]
    before each step by a critic trained apart and limited to 0..1; behind the last step stands the final reward [N], so
    a row's advantages add up to reward - V(first state). Scaling and steps are this project's reading of summaries.
    """
    values = values.detach().clamp(0, 1)
    last = step_mask & ~torch.cat([step_mask[:, 1:], torch.zeros_like(step_mask[:, :1])], 1)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    reached = torch.where(last, final_rewards[:, None], following)
    advantages = torch.where(step_mask, reached - values, 0.0)
    gap = torch.where(step_mask, step_logps - step_ref_logps.detach() - advantages / beta, 0.0)
    return StepAdvantages(gap.square().sum() / 2 / step_mask.sum().clamp(min=1), advantages)


class TokenCredit(NamedTuple):
    """What a DPO model says of each token: [N,T], its sums up to each token [N,T], and over the row [N]."""

    token_rewards: Tensor
    prefix_rewards: Tensor
    sequence_rewards: Tensor


def token_credit(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float = 0.1) -> TokenCredit:
    """beta (logp - ref_logp) by token (arXiv 2404.12358): the sum is DPO's reward of the row, and a fall of the prefix
    sums marks where the model thinks that it went wrong."""
    rewards = torch.where(mask, beta * (logp - ref_logp), 0.0)
    return TokenCredit(rewards, rewards.cumsum(-1), rewards.sum(-1))
