"""Length rewards that compare the rows of a group. All return new rewards [N]; an unscored row (NaN) stays NaN.

`gate` selects the rows where the term applies (see `options.Gate`); elsewhere the reward is unchanged. Lengths are in
tokens of the whole completion. A term has an effect only if the group survives `keep`: a term for all-right groups does
nothing after a filter on mixed correctness.

Shapes: rewards, lengths and factors [N]; values by group [K].
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.advantage.gate import completion_lengths, evaluate_gate, group_pass_rates, is_correct
from posttrain.advantage.group import center_by_group, group_min, group_std, group_sum, number_groups, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.options import Gate
from posttrain.registry import register


@register("group_reward", "kimi_length", paper="2501.12599", needs=("groups", "correct"))
def kimi_length(batch: RolloutBatch, *, weight: float = 0.5, gate: Gate | None = None) -> Tensor:
    """Add a bonus for right rows that are shorter than their group, and a penalty for long ones (Kimi k1.5).

    reward + weight * t, t = 1/2 - (L - shortest) / (longest - shortest) for right rows, min(0, t) for wrong ones.
    shortest and longest are over all rows of the group, including wrong and truncated ones; equal lengths give 0. The
    paper does not state the weight (others use 0.4 to 1); it first trains without the term: `gate: {from_step: 100}`.
    open-r1 counts characters, posttrain tokens.
    """
    term = torch.where(evaluate_gate(batch, gate), kimi_term(batch), 0.0)
    return require_rewards(batch) + weight * term.nan_to_num(nan=0.0)


def kimi_term(batch: RolloutBatch) -> Tensor:
    """Compute the unweighted term of `kimi_length` [N] in [-1/2, 1/2]; NaN where correctness is unknown."""
    assert batch.correct is not None
    lengths, key = completion_lengths(batch), number_groups(batch.group_ids)
    low, high = group_min_max(lengths, key)
    span = (high - low)[key]
    term = torch.where(span > 0, 0.5 - (lengths - low[key]) / span.clamp(min=1), 0.0)
    term = torch.where(is_correct(batch), term, term.clamp(max=0))
    return torch.where(batch.correct.isnan(), torch.nan, term)


@register("group_reward", "length_zscore", paper="2505.18086", needs=("groups", "correct", "all_correct"))
def length_zscore(batch: RolloutBatch, *, alpha: float = 0.2, eps: float = 1e-6, gate: Gate | None = None) -> Tensor:
    """Subtract alpha * sigmoid((L - m) / (s + eps)) from the reward of right rows; wrong rows keep their reward.

    m, s: mean and std (ddof 0) of the right rows' lengths in the group. With a 0/1 reward a right row gets between 1 -
    alpha and 1. gate {top_share: 0.2}: GRPO-lambda, the groups with the highest pass rates; {pass_rate: 0.75}: the
    threshold of its abstract; no gate: the z-scored penalty of Arora and Zanette. alpha (the paper gives no value),
    ddof and eps are guesses. A single right row, or equal lengths, lose alpha / 2.
    """
    lengths, key, correct = completion_lengths(batch), number_groups(batch.group_ids), is_correct(batch)
    count = group_sum(correct.double(), key)
    centered = center_by_group(lengths, correct, key, count)
    z = centered / (group_std(centered, key, count, ddof=0)[key] + eps).clamp(min=torch.finfo(centered.dtype).tiny)
    penalty = torch.where(correct & evaluate_gate(batch, gate), alpha * torch.sigmoid(z), 0.0)
    return require_rewards(batch) - penalty


@register("group_reward", "remaining_length", paper="2505.21178", needs=("groups", "correct", "all_correct"))
def remaining_length(
    batch: RolloutBatch, *, max_length: float, weight: float = 1.0, gate: Gate | None = None
) -> Tensor:
    """Add weight * (1 - min(L, max_length) / max_length) to the reward: the unused share of the context is a bonus.

    ConciseR's second stage with gate {pass_rate: 1.0}: only all-right groups are shortened. The bonus is known from
    reviews; its weight of 1 is a guess. In such a group, a group advantage that divides by the std does not depend on
    the weight. Raises UserError for a max_length of 0 or less.
    """
    if max_length <= 0:
        raise UserError(f"max_length {max_length}", allowed="more than 0 tokens")
    unused = 1 - completion_lengths(batch).clamp(max=max_length) / max_length
    return require_rewards(batch) + torch.where(evaluate_gate(batch, gate), weight * unused, 0.0)


@register("group_reward", "truncation_tiers", paper="2510.15110", needs=("groups", "correct"))
def truncation_tiers(
    batch: RolloutBatch,
    *,
    thresholds: tuple[float, ...] = (0.5,),
    target_lengths: tuple[float, ...] = (4000, 2000),
    gate: Gate | None = None,
) -> Tensor:
    """Set positive rewards to 0 beyond a target length, which is shorter for easier groups (DA-DLER).

    q: share of the group that is right within the largest target. The level is the number of thresholds <= q;
    target_lengths go from the hardest level to the easiest. The paper does not state on which side a q equal to a
    threshold falls, nor which target q is computed with. An easy group may lose every reward; dynamic sampling on the
    reward then drops it. Generate with the largest target.
    """
    key = number_groups(batch.group_ids)
    target = select_target_lengths(batch, thresholds=thresholds, target_lengths=target_lengths)["target_length"][key]
    too_long = (completion_lengths(batch) > target) & evaluate_gate(batch, gate)
    return scale_positive(require_rewards(batch), torch.where(too_long, 0.0, 1.0))


def select_target_lengths(
    batch: RolloutBatch, *, thresholds: tuple[float, ...] = (0.5,), target_lengths: tuple[float, ...] = (4000, 2000)
) -> dict[str, Tensor]:
    """Return the pass rate within the largest target (`ratio` [K]) and the `target_length` [K] of each group.

    Raises UserError unless there is one more target than thresholds.
    """
    if len(target_lengths) != len(thresholds) + 1:
        raise UserError(
            f"{len(thresholds)} thresholds make {len(thresholds) + 1} levels; there are {len(target_lengths)} targets"
        )
    too_long = is_correct(batch) & (completion_lengths(batch) > max(target_lengths))
    assert batch.correct is not None
    counted = batch.replace(correct=torch.where(too_long, 0.0, batch.correct))
    ratio = group_pass_rates(counted)[1].nan_to_num(nan=0.0)  # a group without a judged row counts as all wrong
    edges = torch.tensor(list(thresholds), dtype=ratio.dtype, device=ratio.device)
    level = (edges <= ratio[:, None]).sum(-1)
    targets = torch.tensor(list(target_lengths), dtype=ratio.dtype, device=ratio.device)
    return {"ratio": ratio, "target_length": targets[level]}


@register("group_reward", "gated", paper="2503.06749")
def gate_reward(batch: RolloutBatch, *, gate: Gate, otherwise: float = 0.0) -> Tensor:
    """Return the reward where the gate is open, else `otherwise`; an unscored row stays NaN.

    {on: structure, min: 1.0}: a right answer counts only in the right format (Vision-R1's hard formatting reward).
    """
    rewards = require_rewards(batch)
    return torch.where(evaluate_gate(batch, gate) | rewards.isnan(), rewards, otherwise)


def scale_positive(rewards: Tensor, factor: Tensor) -> Tensor:
    """Multiply positive rewards by factor; negative ones stay, because a factor below 1 must not reduce a penalty."""
    return torch.where(rewards > 0, rewards * factor, rewards)


def group_min_max(values: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value [K] of each group."""
    return group_min(values, key), -group_min(-values, key)
