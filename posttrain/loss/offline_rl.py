"""Offline RL on stored trajectories by step or token: soft Bellman residuals, direct advantages, DPO's credit by token.

N rows, T tokens, S steps; cells with mask 0 may hold any value and are ignored.

Shapes: logp, values and masks [N,T], per-step tensors [N,S], rewards [N].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from posttrain.batch import RolloutBatch, TokenLoss, row_mean
from posttrain.loss.kl import log_ratio_to_reference
from posttrain.registry import register

Level = Literal["token", "response"]


class Oreo(NamedTuple):
    """Losses of OREO: both [] have the same value and different gradients; `residual` [N,T] is detached."""

    value_loss: Tensor
    policy_loss: Tensor
    residual: Tensor


def oreo(
    logp: Tensor,
    ref_logp: Tensor,
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.03,
    level: Level = "token",
) -> Oreo:
    """Compute OREO's residuals d_t = V(s_t) - R + beta sum_{i >= t} u_i, squared (arXiv 2412.16145).

    u = logp - ref_logp, V before token t, R [N]. Both losses are the mean over rows of a row's mean of d_t^2. The value
    loss treats log-probs as constants; the policy loss treats V and later tokens as constants, so its gradient by
    logp_t is 2 beta d_t / (length N). `response`: one residual per row, at its start, with the gradient of all its
    tokens; values may be [N,1]. An empty row gives 0. For step level pass sums over steps. Update the value first.
    """
    by_value, by_policy, states = residuals(logp, ref_logp, values, rewards, mask, beta=beta, level=level)
    return Oreo(_row_means(by_value.square(), states), _row_means(by_policy.square(), states), by_value.detach())


def residuals(
    logp: Tensor,
    ref_logp: Tensor,
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    beta: float,
    level: Level = "token",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_t of `oreo` [N,T] with the gradient of V only, d_t with the gradient of log-probs only, and the states.

    States [N,T] are the trained tokens, or with `response` the first of each row; d_t is 0 elsewhere.
    """
    u = torch.where(mask, logp, 0.0) - torch.where(mask, ref_logp.detach(), 0.0)
    tail = u.flip(-1).cumsum(-1).flip(-1)
    states = mask if level == "token" else mask & (mask.long().cumsum(-1) == 1)
    value_residual = torch.where(states, values - rewards[:, None] + beta * tail.detach(), 0.0)
    trained = u if level == "token" else tail
    policy_residual = torch.where(states, value_residual.detach() + beta * (trained - trained.detach()), 0.0)
    return value_residual, policy_residual, states


@register(
    "loss",
    "oreo",
    paper="2412.16145",
    needs=("rewards", "ref_logp", "new_values", "every_row", "own_credit"),
    note=(
        "The authors' code adds 0.01 times a KL over the whole vocabulary; here that is `kl`, by sampled token. The"
        " critic is a head on the policy's features, not a second model."
    ),
)
def oreo_loss(batch: RolloutBatch, logp: Tensor, *, beta: float = 0.03, level: Level = "token") -> TokenLoss:
    """Compute OREO's squared soft Bellman residuals d_t = V(s_t) - R + beta sum_{i >= t} (logp_i - ref_logp_i).

    Valid for trajectories of any policy. The value head learns d_t = 0 with log-probs fixed, the policy with V and
    later tokens fixed; both in the same update, from the same values. `response`: one residual per row, at its start,
    with the gradient of all its tokens. R is the reward, 1 for correct and 0 for wrong; rows without a reward are
    ignored. `oreo_step` has states at the starts of steps. Stats: `oreo/error` (mean d^2), `oreo/value` (V),
    `oreo/margin` (beta times the row's log-ratio, negated if R < 1/2; it should grow).
    """
    values, rewards, mask = _select_scored(batch)
    found = residuals(logp, _reference(batch), values, rewards, mask, beta=beta, level=level)
    return _value_and_policy_loss(batch, *found[:2], values, found[2], _margin(batch, logp, beta))


@register(
    "loss",
    "oreo_step",
    paper="2412.16145",
    needs=("rewards", "ref_logp", "new_values", "turn_ids", "every_row", "own_credit"),
)
def oreo_step(batch: RolloutBatch, logp: Tensor, *, beta: float = 0.03) -> TokenLoss:
    """Compute `oreo` with states at the starts of steps (`scoring.split`) or turns: an action is all tokens of a step.

    Mean over rows of a row's mean over steps. Stats: `oreo/error`, `oreo/value`, `oreo/margin`.
    """
    values, rewards, mask = _select_scored(batch)
    steps = find_steps(batch)
    found = residuals(
        steps.sum(torch.where(mask, logp, 0.0)), steps.sum(_reference(batch)), steps.first(values), rewards,
        steps.valid & mask.any(-1, keepdim=True), beta=beta,
    )  # fmt: skip
    by_value, by_policy = (steps.scatter(d) for d in found[:2])
    return _value_and_policy_loss(batch, by_value, by_policy, values, mask & steps.starts, _margin(batch, logp, beta))


class Steps(NamedTuple):
    """Trained tokens [N,T] of N rows grouped into up to S steps each. Only groups with a trained token are steps."""

    number: Tensor  # [N,T] int64, index of the step that a token belongs to, from 0; S for untrained tokens
    starts: Tensor  # [N,T] bool, the first trained token of a step
    valid: Tensor  # [N,S] bool, steps that have a trained token

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over the tokens of each step, [N,T] -> [N,S]."""
        out = values.new_zeros(len(values), self.valid.shape[1] + 1)
        return out.scatter_add(-1, self.number, values)[:, :-1]

    def first(self, values: Tensor) -> Tensor:
        """Return the value at the first token of each step, [N,T] -> [N,S]."""
        return self.sum(torch.where(self.starts, values, 0.0))

    def scatter(self, values: Tensor) -> Tensor:
        """Place the value of each step at its first token and 0 elsewhere, [N,S] -> [N,T]."""
        wider = torch.cat([values, torch.zeros_like(values[:, :1])], -1)
        return torch.where(self.starts, wider.gather(-1, self.number), 0.0)


def find_steps(batch: RolloutBatch) -> Steps:
    """Group the trained tokens [N,T] into steps by `turn_ids`. Raises ValueError for a batch without turn_ids."""
    if batch.turn_ids is None:
        raise ValueError("this loss needs to know the steps of a completion (turn_ids)")
    turns = torch.where(batch.mask, batch.turn_ids, -1)
    before = torch.cat([torch.full_like(turns[:, :1], -1), turns.cummax(-1).values[:, :-1]], -1)
    starts = batch.mask & (turns > before)
    count = starts.sum(-1)
    most = max(int(count.max()), 1) if len(count) else 1
    number = torch.where(batch.mask, starts.cumsum(-1) - 1, most)
    return Steps(number, starts, torch.arange(most, device=count.device) < count[:, None])


def _select_scored(batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the critic's values [N,T], rewards [N] and the trained tokens [N,T] of rows with a reward."""
    if batch.new_values is None or batch.rewards is None:
        raise ValueError("this loss needs rewards and the critic's values")
    mask = batch.mask & ~batch.rewards.isnan()[:, None]
    rewards = batch.rewards.detach().nan_to_num(0.0).to(batch.new_values)
    return torch.where(mask, batch.new_values, 0.0), rewards, mask


def _reference(batch: RolloutBatch) -> Tensor:
    """Return ref_logp [N,T], detached, 0 where masked."""
    assert batch.ref_logp is not None
    return torch.where(batch.mask, batch.ref_logp.detach(), 0.0)


def _margin(batch: RolloutBatch, logp: Tensor, beta: float) -> Tensor:
    """Return beta times the log-ratio of each row [N], negated if the reward is below 1/2, 0 without a reward."""
    assert batch.rewards is not None
    u = log_ratio_to_reference(batch, logp.detach()).sum(-1)
    return beta * torch.where(batch.rewards.isnan(), 0.0, torch.where(batch.rewards > 0.5, u, -u))


def _value_and_policy_loss(
    batch: RolloutBatch, by_value: Tensor, by_policy: Tensor, values: Tensor, states: Tensor, margin: Tensor
) -> TokenLoss:
    """Return the sum of value and policy loss: a row's mean over its states, at each of its trained tokens."""
    count = states.sum(-1).clamp(min=1)

    def rows(x: Tensor) -> Tensor:
        means = torch.where(states, x, 0.0).sum(-1, keepdim=True) / count[:, None]
        return torch.where(batch.mask, means, 0.0)

    stats = {"oreo/error": rows(by_value.detach().square()), "oreo/value": rows(values.detach()), "oreo/margin": margin}
    return TokenLoss(rows(by_value.square() + by_policy.square()), stats)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over rows of the mean over a row's trained cells; an empty row is 0."""
    return row_mean(values, mask).sum() / max(len(values), 1)


class StepAdvantages(NamedTuple):
    """Result of `direct_advantage`."""

    loss: Tensor  # []
    advantages: Tensor  # [N,S] detached


def direct_advantage(
    step_logps: Tensor,
    step_ref_logps: Tensor,
    values: Tensor,
    final_rewards: Tensor,
    step_mask: Tensor,
    *,
    beta: float = 0.1,
) -> StepAdvantages:
    """Compute half the mean over steps of (u_s - A_s / beta)^2 (arXiv 2412.18279).

    This is direct advantage policy optimization. u_s = log-ratio of a step's tokens to the policy that wrote them. A_s
    = V(next state) - V(state), values [N,S] before each step from a separately trained critic, clamped to 0..1; after
    the last step the final reward [N] takes the place of V, so a row's advantages add up to reward - V(first state).
    Scaling and steps are this project's reading of summaries.
    """
    advantages, gap = advantage_gaps(step_logps, step_ref_logps, values, final_rewards, step_mask, beta=beta)
    return StepAdvantages(gap.square().sum() / 2 / step_mask.sum().clamp(min=1), advantages)


def advantage_gaps(
    step_logps: Tensor,
    step_ref_logps: Tensor,
    values: Tensor,
    final_rewards: Tensor,
    step_mask: Tensor,
    *,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return A_s, detached, and u_s - A_s / beta of `direct_advantage`, [N,S], 0 for missing steps."""
    values = values.detach().clamp(0, 1)
    last = step_mask & ~torch.cat([step_mask[:, 1:], torch.zeros_like(step_mask[:, :1])], 1)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    reached = torch.where(last, final_rewards[:, None], following)
    advantages = torch.where(step_mask, reached - values, 0.0)
    u = torch.where(step_mask, step_logps, 0.0) - torch.where(step_mask, step_ref_logps.detach(), 0.0)
    return advantages, torch.where(step_mask, u - advantages / beta, 0.0)


@register(
    "loss",
    "direct_advantage",
    paper="2412.18279",
    needs=("rewards", "ref_logp", "values", "turn_ids", "every_row", "own_mean", "frozen_critic", "own_credit"),
    note=(
        "The paper calls it DAPO; it is unrelated to DAPO's clip. Scaling and the definition of a step are inferred"
        " from summaries. The paper does not state beta."
    ),
)
def direct_advantage_loss(batch: RolloutBatch, logp: Tensor, *, beta: float = 0.1) -> TokenLoss:
    """Compute half the mean over steps of (u_s - A_s / beta)^2, for trajectories of any policy.

    This is direct advantage policy optimization. u_s: the log-ratio of a step's tokens to the reference. A_s = V(next
    step) - V(step), with the reward (0 to 1) instead of V after the last step; V from a separately trained critic
    (`loss: critic`), which is frozen. Steps: `scoring.split`, or turns. Rows without a reward are ignored. Stats:
    `direct_advantage/error` (mean gap^2 of a row), `direct_advantage/margin` (sum of A_s u_s; it should grow). Raises
    ValueError for a batch without rewards or values of a critic.
    """
    if batch.values is None or batch.rewards is None:
        raise ValueError("direct_advantage needs rewards and a critic's values")
    steps = find_steps(batch.replace(mask=batch.mask & ~batch.rewards.isnan()[:, None]))
    mask = steps.number < steps.valid.shape[1]
    current = steps.sum(torch.where(mask, logp, 0.0))
    ref = steps.sum(torch.where(mask, _reference(batch), 0.0))
    values = steps.first(torch.where(mask, torch.sigmoid(batch.values.to(logp.dtype)), 0.0))
    rewards = batch.rewards.nan_to_num(0.0).to(logp.dtype)
    advantages, gap = advantage_gaps(current, ref, values, rewards, steps.valid, beta=beta)
    count = steps.valid.sum(-1).clamp(min=1)
    stats = {
        "direct_advantage/error": gap.detach().square().sum(-1) / count,
        "direct_advantage/margin": (advantages * torch.where(steps.valid, (current - ref).detach(), 0.0)).sum(-1),
    }
    return TokenLoss(steps.scatter(gap.square() / 2), stats, counted=steps.starts)


@register("loss", "critic", paper="2412.18279", needs=("rewards", "new_values", "every_row", "own_credit"))
def critic(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Train only the value head: cross-entropy of sigmoid(V) at every state with the outcome (the reward, 0 to 1).

    V becomes the probability of a correct outcome, which `direct_advantage` reads (`critic.path`). The policy does not
    change. Stats: `critic/loss`, `critic/error` ((sigmoid(V) - R)^2).
    """
    values, rewards, mask = _select_scored(batch)
    targets = rewards.clamp(0, 1)[:, None].expand_as(values)
    losses = torch.where(mask, binary_cross_entropy_with_logits(values, targets, reduction="none"), 0.0)
    errors = torch.where(mask, (torch.sigmoid(values.detach()) - targets).square(), 0.0)
    return TokenLoss(losses.to(logp.dtype), {"critic/loss": losses.detach(), "critic/error": errors})


class TokenCredit(NamedTuple):
    """Rewards that a DPO model implies for each token [N,T], their prefix sums [N,T], and their row sums [N]."""

    token_rewards: Tensor
    prefix_rewards: Tensor
    sequence_rewards: Tensor


def token_credit(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float = 0.1) -> TokenCredit:
    """Return beta (logp - ref_logp) per token (arXiv 2404.12358).

    The sum is DPO's reward of the row; a drop in the prefix sums marks where, according to the model, the answer goes
    wrong.
    """
    rewards = torch.where(mask, beta * (logp - ref_logp), 0.0)
    return TokenCredit(rewards, rewards.cumsum(-1), rewards.sum(-1))
