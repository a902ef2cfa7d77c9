"""Advantages where one thought is answered at several points: at budgets (BRPO), or where it was cut (S-GRPO)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posttrain.advantage.group import rewards_of
from posttrain.batch import RolloutBatch
from posttrain.registry import register

Baseline = Literal["brpo", "v1", "v2", "none"]


class Anytime(NamedTuple):
    """thought [..., G, S]: advantage of the tokens between two budgets; answers [..., G, S, A]: of each answer."""

    thought: Tensor
    answers: Tensor


def budget_relative(
    scores: Tensor, budget_probs: Tensor, *, discount: float = 2.0, variance_reduction: Baseline = "brpo"
) -> Anytime:
    """BRPO (AnytimeReasoner, arXiv 2505.13438): credit of a thought by what its answers earn at later budgets.

    scores [..., G, S, A]: of A answers after each of S cuts of G thoughts; budget_probs [S]: weights of the budgets,
    any sum. With q = mean over answers and R[g,s] = sum over k >= s of p_k q[g,k], the advantage of segment s is R
    minus (s V1 + (S - s) V2) / S. V1 is the mean of the thought's own earlier q, the k-th weighted by discount^k, times
    the sum of p_k for k >= s; V2 the mean of R over the group, 0 for one thought. `v1`, `v2`, `none`: that baseline
    alone. An answer is compared with the others after its cut; a single one with those of the other thoughts.
    """
    p = budget_probs / budget_probs.sum()
    q = scores.mean(-1)
    ahead = _later(p)
    returns = _later(p * q)
    group = returns.shape[-2]
    v2 = returns.mean(-2, keepdim=True) if group > 1 else torch.zeros_like(returns)
    place = torch.arange(q.shape[-1], dtype=q.dtype)
    decay = discount**place
    earlier = (decay * q).cumsum(-1) - decay * q
    known = decay.cumsum(-1) - decay
    v1 = torch.where(known > 0, earlier / known.clamp(min=1e-300), 0.0) * ahead
    budgets = len(p)
    mixed = (place * v1 + (budgets - place) * v2) / budgets
    baseline = {"brpo": mixed, "v1": v1, "v2": v2.expand_as(returns), "none": torch.zeros_like(returns)}
    across = -1 if scores.shape[-1] > 1 else -3
    return Anytime(returns - baseline[variance_reduction], scores - scores.mean(across, keepdim=True))


def _later(values: Tensor) -> Tensor:
    """Sums over this place and all later ones, along the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)


class Exits(NamedTuple):
    """rewards [B][K] of the answers of one thought, the earliest exit first; advantages: of all, flat."""

    rewards: list[list[float]]
    advantages: list[float]


def exit_decay(correct: Sequence[Sequence[float]], *, decay: float = 2.0) -> Exits:
    """S-GRPO (arXiv 2505.07686): the k-th right answer from the earliest exit on earns decay^-(k-1), wrong ones 0.

    correct [B][K], 0 or 1, in the order of the exits, the whole thought last. Advantages: reward - mean of the K.
    """
    rewards: list[list[float]] = []
    for row in correct:
        before = itertools.accumulate((bool(right) for right in row), initial=0)
        rewards.append([float(decay**-earlier) if right else 0.0 for right, earlier in zip(row, before, strict=False)])
    return Exits(rewards, [r - sum(row) / len(row) for row in rewards for r in row])


@register(
    "group_reward", "exit_decay", paper="2505.07686", needs=("correct", "all_correct", "trajectory_ids", "step_ids")
)
def decay_exits(batch: RolloutBatch, *, decay: float = 2.0) -> Tensor:
    """S-GRPO: among the answers of one thought (`rollout.shape: serial_exit`) the k-th right one from the earliest exit
    on earns decay^-(k-1), wrong ones 0 -> [N]. A row without a score keeps none, and counts as wrong for later ones.

    It replaces the rewards: length or format terms beside correctness are not in the result.
    """
    assert batch.correct is not None and batch.trajectory_ids is not None and batch.step_ids is not None
    rewards = rewards_of(batch)
    unscored = rewards.isnan() | batch.correct.isnan()
    known, found = torch.where(unscored, 0.0, batch.correct), torch.zeros_like(rewards)
    for trajectory in batch.trajectory_ids.unique():
        rows = (batch.trajectory_ids == trajectory).nonzero()[:, 0]
        rows = rows[batch.step_ids[rows].argsort()]
        (earned,) = exit_decay([known[rows].tolist()], decay=decay).rewards
        found[rows] = torch.tensor(earned, dtype=rewards.dtype, device=rewards.device)
    return torch.where(unscored, torch.nan, found)
