"""Length rewards that look at a whole group. All give new rewards [N]; a row that was not scored (NaN) stays so.

`gate` says where the term applies (see `options.Gate`); elsewhere the reward stays what it was. Lengths are in tokens
of the whole completion. A term acts only where the group survives `keep`: one that shortens groups in which everything
is right does nothing behind a filter on mixed correctness.

Shapes: rewards, lengths and factors [N]; what belongs to groups [K].
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.advantage.gate import group_pass_rates, open_rows, right, row_lengths
from posttrain.advantage.group import centre, group_min, group_sum, number_groups, rewards_of, std
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.options import Gate
from posttrain.registry import register


@register("group_reward", "kimi_length", paper="2501.12599", needs=("groups", "correct"))
def kimi_length(batch: RolloutBatch, *, weight: float = 0.5, gate: Gate | None = None) -> Tensor:
    """reward + weight * t, t = 1/2 - (L - shortest) / (longest - shortest) for right rows, min(0, t) for wrong ones.

    shortest and longest over all rows of the group, wrong and truncated ones too; equal lengths give 0. The paper does
    not state the weight (others use 0.4 to 1); it trains without the term first: `gate: {from_step: 100}`. open-r1
    counts characters, posttrain tokens.
    """
    term = torch.where(open_rows(batch, gate), kimi_term(batch), 0.0)
    return rewards_of(batch) + weight * term.nan_to_num(nan=0.0)


def kimi_term(batch: RolloutBatch) -> Tensor:
    """The unweighted term [N] in [-1/2, 1/2]; NaN where correctness is unknown."""
    assert batch.correct is not None
    lengths, key = row_lengths(batch), number_groups(batch.group_ids)
    low, high = extremes(lengths, key)
    span = (high - low)[key]
    term = torch.where(span > 0, 0.5 - (lengths - low[key]) / span.clamp(min=1), 0.0)
    term = torch.where(right(batch), term, term.clamp(max=0))
    return torch.where(batch.correct.isnan(), torch.nan, term)


@register("group_reward", "length_zscore", paper="2505.18086", needs=("groups", "correct", "all_correct"))
def length_zscore(batch: RolloutBatch, *, alpha: float = 0.2, eps: float = 1e-6, gate: Gate | None = None) -> Tensor:
    """reward - alpha * sigmoid((L - m) / (s + eps)) for right rows; m, s: mean and std (ddof 0) of the right rows'
    lengths in the group. Wrong rows keep their reward.

    With a 0/1 reward a right row gets between 1 - alpha and 1. gate {top_share: 0.2}: GRPO-lambda, the groups that can
    afford it; {pass_rate: 0.75}: the threshold of its abstract; no gate: the z-scored penalty of Arora and Zanette.
    alpha (the paper gives no value), ddof and eps are guesses. One right row, or equal lengths: alpha / 2 comes off.
    """
    lengths, key, scored = row_lengths(batch), number_groups(batch.group_ids), right(batch)
    count = group_sum(scored.double(), key)
    away = centre(lengths, scored, key, count)
    z = away / (std(away, key, count, ddof=0)[key] + eps).clamp(min=torch.finfo(away.dtype).tiny)
    penalty = torch.where(scored & open_rows(batch, gate), alpha * torch.sigmoid(z), 0.0)
    return rewards_of(batch) - penalty


@register("group_reward", "remaining_length", paper="2505.21178", needs=("groups", "correct", "all_correct"))
def remaining_length(
    batch: RolloutBatch, *, max_length: float, weight: float = 1.0, gate: Gate | None = None
) -> Tensor:
    """reward + weight * (1 - min(L, max_length) / max_length): the unused share of the context is a bonus.

    ConciseR's second stage with gate {pass_rate: 1.0}: only groups in which everything is right are shortened. The
    bonus is known from reviews; its weight of 1 is a guess. A group advantage that divides by the std does not depend
    on the weight in such a group. Raises UserError for a max_length of 0 or less.
    """
    if max_length <= 0:
        raise UserError(f"max_length {max_length}", allowed="more than 0 tokens")
    left = 1 - row_lengths(batch).clamp(max=max_length) / max_length
    return rewards_of(batch) + torch.where(open_rows(batch, gate), weight * left, 0.0)


@register("group_reward", "truncation_tiers", paper="2510.15110", needs=("groups", "correct"))
def truncation_tiers(
    batch: RolloutBatch,
    *,
    thresholds: tuple[float, ...] = (0.5,),
    target_lengths: tuple[float, ...] = (4000, 2000),
    gate: Gate | None = None,
) -> Tensor:
    """The positive part of the reward is lost beyond the group's target length: the easier the group, the shorter.

    DA-DLER. q: share of the group that is right within the largest target; the level is the number of thresholds <= q,
    target_lengths go from the hardest level to the easiest. The paper does not state on which side a q equal to a
    threshold falls, nor with which target q is measured. An easy group may lose every reward: dynamic sampling on the
    reward drops it. Generate with the largest target.
    """
    key = number_groups(batch.group_ids)
    target = tiers(batch, thresholds=thresholds, target_lengths=target_lengths)["target_length"][key]
    too_long = (row_lengths(batch) > target) & open_rows(batch, gate)
    return times_positive(rewards_of(batch), torch.where(too_long, 0.0, 1.0))


def tiers(
    batch: RolloutBatch, *, thresholds: tuple[float, ...] = (0.5,), target_lengths: tuple[float, ...] = (4000, 2000)
) -> dict[str, Tensor]:
    """Share of right answers within the largest target (`ratio` [K]) and the `target_length` [K] of each group.

    Raises UserError unless there is one target more than thresholds.
    """
    if len(target_lengths) != len(thresholds) + 1:
        raise UserError(
            f"{len(thresholds)} thresholds make {len(thresholds) + 1} levels; there are {len(target_lengths)} targets"
        )
    too_long = right(batch) & (row_lengths(batch) > max(target_lengths))
    assert batch.correct is not None
    counted = batch.replace(correct=torch.where(too_long, 0.0, batch.correct))
    ratio = group_pass_rates(counted)[1].nan_to_num(nan=0.0)  # as if all were wrong, where none was judged
    edges = torch.tensor(list(thresholds), dtype=ratio.dtype, device=ratio.device)
    level = (edges <= ratio[:, None]).sum(-1)
    targets = torch.tensor(list(target_lengths), dtype=ratio.dtype, device=ratio.device)
    return {"ratio": ratio, "target_length": targets[level]}


@register("group_reward", "gated", paper="2503.06749")
def gate_reward(batch: RolloutBatch, *, gate: Gate, otherwise: float = 0.0) -> Tensor:
    """The reward where the gate is open, else `otherwise`; a row that was not scored stays so.

    {on: structure, min: 1.0}: a right answer counts only in the right format (Vision-R1's hard formatting reward).
    """
    rewards = rewards_of(batch)
    return torch.where(open_rows(batch, gate) | rewards.isnan(), rewards, otherwise)


def times_positive(rewards: Tensor, factor: Tensor) -> Tensor:
    """rewards * factor where positive: a factor below 1 must not make a penalty milder."""
    return torch.where(rewards > 0, rewards * factor, rewards)


def extremes(values: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value [K] of each group."""
    return group_min(values, key), -group_min(-values, key)
