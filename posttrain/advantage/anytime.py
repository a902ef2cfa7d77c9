"""Advantages for one thought that is answered at several points: at token budgets (BRPO) or at early exits (S-GRPO)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posttrain.advantage.group import number_groups, require_rewards, sort_by_rollout
from posttrain.batch import RolloutBatch
from posttrain.registry import register

Baseline = Literal["brpo", "v1", "v2", "none"]


class AnytimeAdvantages(NamedTuple):
    """Advantages of BRPO for thoughts and answers.

    thought [..., G, S]: advantage of the tokens of each segment between two budgets; answers [..., G, S, A]: advantage
    of each answer.
    """

    thought: Tensor
    answers: Tensor


def budget_relative(
    scores: Tensor, budget_probs: Tensor, *, discount: float = 2.0, variance_reduction: Baseline = "brpo"
) -> AnytimeAdvantages:
    """Credit a thought with the scores of its answers at later budgets (BRPO, AnytimeReasoner, arXiv 2505.13438).

    scores [..., G, S, A]: scores of the A answers after each of the S cuts of G thoughts. budget_probs [S]: weights of
    the budgets; they need not sum to 1. With q = mean over answers and R[g,s] = sum over k >= s of p_k q[g,k], the
    advantage of segment s is R minus (s V1 + (S - s) V2) / S. V1 is the mean of the thought's own earlier q, weighting
    the k-th by discount^k, times the sum of p_k for k >= s; V2 is the mean of R over the group, 0 for a single thought.
    `v1`, `v2` and `none` use that baseline alone. An answer is compared with the other answers after the same cut; a
    single answer per cut is compared with the answers of the other thoughts.
    """
    p = budget_probs / budget_probs.sum()
    q = scores.mean(-1)
    ahead = _suffix_sum(p)
    returns = _suffix_sum(p * q)
    group = returns.shape[-2]
    v2 = returns.mean(-2, keepdim=True) if group > 1 else torch.zeros_like(returns)
    index = torch.arange(q.shape[-1], dtype=q.dtype, device=q.device)
    decay = discount**index
    earlier = (decay * q).cumsum(-1) - decay * q
    known = decay.cumsum(-1) - decay
    v1 = torch.where(known > 0, earlier / known.clamp(min=1e-300), 0.0) * ahead
    budgets = len(p)
    mixed = (index * v1 + (budgets - index) * v2) / budgets
    baseline = {"brpo": mixed, "v1": v1, "v2": v2.expand_as(returns), "none": torch.zeros_like(returns)}
    across = -1 if scores.shape[-1] > 1 else -3
    return AnytimeAdvantages(returns - baseline[variance_reduction], scores - scores.mean(across, keepdim=True))


def _suffix_sum(values: Tensor) -> Tensor:
    """Return the sum over this index and all later ones, along the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)


class ExitRewards(NamedTuple):
    """Rewards and advantages of S-GRPO.

    rewards [B][K]: of the answers of each thought, earliest exit first; advantages: of all answers, flattened.
    """

    rewards: list[list[float]]
    advantages: list[float]


def exit_decay(correct: Sequence[Sequence[float]], *, decay: float = 2.0) -> ExitRewards:
    """Reward right answers of a thought with decay^-(k-1), k from the earliest exit on (S-GRPO, arXiv 2505.07686).

    Wrong answers get 0. correct [B][K]: 0 or 1, in the order of the exits, with the answer of the full thought last.
    The advantage is the reward minus the mean of the K rewards.
    """
    rewards: list[list[float]] = []
    for row in correct:
        before = itertools.accumulate((bool(right) for right in row), initial=0)
        rewards.append([float(decay**-earlier) if right else 0.0 for right, earlier in zip(row, before, strict=False)])
    return ExitRewards(rewards, [r - sum(row) / len(row) for row in rewards for r in row])


@register(
    "group_reward", "exit_decay", paper="2505.07686", needs=("correct", "all_correct", "trajectory_ids", "step_ids")
)
def decay_exits(batch: RolloutBatch, *, decay: float = 2.0) -> Tensor:
    """Reward the k-th right answer of a thought, from the earliest exit on, with decay^-(k-1) -> [N] (S-GRPO).

    For `rollout.shape: serial_exit`. Wrong answers get 0. A row without a score keeps NaN, and counts as wrong for
    later exits. The result replaces the rewards: length or format terms beside correctness are not included.
    """
    assert batch.correct is not None and batch.trajectory_ids is not None and batch.step_ids is not None
    rewards = require_rewards(batch)
    unscored = rewards.isnan() | batch.correct.isnan()
    known, scores = torch.where(unscored, 0.0, batch.correct), torch.zeros_like(rewards)
    for trajectory in batch.trajectory_ids.unique():
        rows = (batch.trajectory_ids == trajectory).nonzero()[:, 0]
        rows = rows[batch.step_ids[rows].argsort()]
        (earned,) = exit_decay([known[rows].tolist()], decay=decay).rewards
        scores[rows] = torch.tensor(earned, dtype=rewards.dtype, device=rewards.device)
    return torch.where(unscored, torch.nan, scores)


Prior = Literal["linear", "uniform", "base"]
_PRIORS: dict[Prior, Callable[[int], Tensor]] = {
    "linear": lambda budgets: torch.arange(1, budgets + 1),
    "uniform": torch.ones,
    "base": lambda budgets: torch.arange(budgets) == budgets - 1,
}


@register("advantage", "budget_relative", paper="2505.13438", needs=("trajectory_ids", "step_ids", "part_ids"))
def advantage_at_budgets(
    batch: RolloutBatch, *, prior: Prior = "linear", discount: float = 2.0, baseline: Baseline = "brpo"
) -> Tensor:
    """Credit the tokens of a thought with the scores of its answers at their budget and later ones -> [N,T] (BRPO).

    For `rollout.shape: budgets`. The last row of a rollout is its thought, whose `part_ids` give the budget that each
    token belongs to; the other rows are answers, with the number of their budget. prior: weights of the budgets:
    `linear` 1, 2, 3, ..., `uniform`, or `base` (the last budget alone). See `budget_relative` for discount and
    baseline. No division by a std. An answer without a score counts as the mean of the answers at its cut, or 0 if none
    has a score. Raises AssertionError for a batch without trajectory_ids.
    """
    assert batch.trajectory_ids is not None and batch.step_ids is not None and batch.part_ids is not None
    rewards, parts = require_rewards(batch).double(), torch.where(batch.mask, batch.part_ids, 0)
    rollout = number_groups(batch.trajectory_ids)
    order, thoughts, _ = sort_by_rollout(batch.trajectory_ids, batch.step_ids)  # the thought is the last row
    answers = order[~torch.isin(order, thoughts)]
    budgets = int(parts.max()) + 1

    cut = rollout[answers] * budgets + parts[answers].amax(-1)  # non-decreasing: answers are in the order of their cuts
    number = torch.arange(len(cut), device=cut.device) - torch.searchsorted(cut, cut)
    scores = rewards.new_full((len(thoughts) * budgets, int(number.max()) + 1 if len(cut) else 1), torch.nan)
    scores[cut, number] = rewards[answers]
    known = scores.nanmean(-1, keepdim=True).nan_to_num(nan=0.0)
    scores = torch.where(scores.isnan(), known, scores).reshape(len(thoughts), budgets, -1)
    weights = _PRIORS[prior](budgets).to(rewards)
    advantages = torch.zeros(batch.mask.shape, dtype=torch.float64, device=rewards.device)
    for group in batch.group_ids[thoughts].unique():
        members = (batch.group_ids[thoughts] == group).nonzero()[:, 0]
        credit = budget_relative(scores[members], weights, discount=discount, variance_reduction=baseline)
        advantages[thoughts[members]] = credit.thought.gather(1, parts[thoughts[members]])
        scores[members] = credit.answers
    advantages[answers] = torch.where(rewards[answers].isnan(), 0.0, scores.flatten(0, 1)[cut, number])[:, None]
    return torch.where(batch.mask, advantages, 0.0)
