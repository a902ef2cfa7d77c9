"""Advantages where one thought is answered at several points: at budgets (BRPO), or where it was cut (S-GRPO)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
    place = torch.arange(q.shape[-1], dtype=q.dtype, device=q.device)
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
    """BRPO: a thought's tokens are credited with what its answers earn at their budget and later ones -> [N,T]
    (`rollout.shape: budgets`).

    The last row of a rollout is its thought, whose `part_ids` say which budget a token counts for; the others are
    answers, with the number of their budget. prior: weights of the budgets, `linear` 1, 2, 3, ..., `uniform`, or
    `base`, the last alone. See `budget_relative` for discount and baseline. No std. An answer without a score counts as
    the mean of those at its cut, 0 where there is none. Raises AssertionError for a batch without trajectory_ids.
    """
    assert batch.trajectory_ids is not None and batch.step_ids is not None and batch.part_ids is not None
    rewards, parts = rewards_of(batch).double(), torch.where(batch.mask, batch.part_ids, 0)
    rollout, counts = torch.unique(batch.trajectory_ids, return_inverse=True, return_counts=True)[1:]
    order = (rollout * (int(batch.step_ids.max()) + 1) + batch.step_ids).argsort()  # by rollout, the thought last
    thoughts = order[counts.cumsum(0) - 1]
    answers = order[~torch.isin(order, thoughts)]
    budgets = int(parts.max()) + 1
    cut = rollout[answers] * budgets + parts[answers].amax(-1)  # which rises: answers stand in the order of their cuts
    number = torch.arange(len(cut), device=cut.device) - torch.searchsorted(cut, cut)
    scores = rewards.new_full((len(thoughts) * budgets, int(number.max()) + 1 if len(cut) else 1), torch.nan)
    scores[cut, number] = rewards[answers]
    known = scores.nanmean(-1, keepdim=True).nan_to_num(nan=0.0)
    scores = torch.where(scores.isnan(), known, scores).reshape(len(thoughts), budgets, -1)
    weights = _PRIORS[prior](budgets).to(rewards)
    found = torch.zeros(batch.mask.shape, dtype=torch.float64, device=rewards.device)
    for group in batch.group_ids[thoughts].unique():
        mine = (batch.group_ids[thoughts] == group).nonzero()[:, 0]
        credit = budget_relative(scores[mine], weights, discount=discount, variance_reduction=baseline)
        found[thoughts[mine]] = credit.thought.gather(1, parts[thoughts[mine]])
        scores[mine] = credit.answers
    found[answers] = torch.where(rewards[answers].isnan(), 0.0, scores.flatten(0, 1)[cut, number])[:, None]
    return torch.where(batch.mask, found, 0.0)
