"""Aggregation of a token matrix to a scalar loss, with the denominator of the whole optimizer batch.

Each micro-batch returns its sum divided by the batch's total, and the parts are added; there is no second division.
Loss and gradient therefore do not depend on how the batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "local_token_mean", "trajectory_mean"
]


@dataclass(frozen=True)
class Totals:
    """Trained tokens and rows of one optimizer batch, over all its micro-batches and ranks.

    groups, weight: number of groups and the sum of their weights, for group losses. terms: name -> denominator in
    tokens, for loss terms with their own mean. trajectories: rollouts that consist of several rows; a rollout partly in
    the batch counts by its share of tokens.
    """

    tokens: float
    rows: float
    groups: float = 0.0
    weight: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    trajectories: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        terms = {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in {**self.terms, **other.terms}}
        return Totals(
            self.tokens + other.tokens,
            self.rows + other.rows,
            self.groups + other.groups,
            self.weight + other.weight,
            terms,
            self.trajectories + other.trajectories,
        )


def totals(mask: Tensor, count_empty_rows: bool = True, trajectory_tokens: Tensor | None = None) -> Totals:
    """Count the trained tokens, rows and trajectories of a mask [N,T].

    Rows without a trained token stay in the row count unless `count_empty_rows` is False. Excluding them (verl) raises
    the weight of the other rows whenever tokens are masked; including them (TRL) does not. trajectory_tokens [N]:
    trained tokens of the rollout that each row belongs to; None = each row is a whole rollout.
    """
    lengths = mask.bool().sum(-1)
    rows = lengths.numel() if count_empty_rows else int((lengths > 0).sum())
    rollout_tokens = lengths if trajectory_tokens is None else trajectory_tokens
    trajectories = float((lengths / rollout_tokens.clamp(min=1)).sum())
    return Totals(float(lengths.sum()), float(rows), trajectories=trajectories)


def count_trajectory_tokens(mask: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Return the trained tokens [N] of each row's rollout. mask [N,T]; trajectory_ids [N], any integers."""
    number = torch.unique(trajectory_ids, return_inverse=True)[1]
    tokens = mask.bool().sum(-1)
    return torch.zeros_like(tokens).index_add(0, number, tokens)[number]


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: Aggregation,
    totals: Totals,
    norm_len: float | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """Return the scalar that these rows add to the loss. values, mask [N,T]; cells with mask 0 are ignored.

        token_mean           sum / tokens                    each token has the same weight (DAPO)
        seq_mean_token_mean  row means / rows                each row has the same weight (GRPO)
        seq_mean_token_sum   row sums / rows                 policy gradient of the sequence reward
        fixed                row sums / (rows * norm_len)    Dr. GRPO; norm_len is a constant, not the longest row
        local_token_mean     sum / tokens of these rows      TRL's bnpo: depends on micro-batches, which weigh by rows
        trajectory_mean      rollout means / rollouts        each rollout has the same weight, however many rows it has
                                                             (Delethink); one without a trained token is not counted

    trajectory_tokens [N]: see `totals`. An empty batch returns 0, still attached to the graph. Raises ValueError for an
    unknown mode or a missing norm_len.
    """
    mask = mask.bool()
    masked = torch.where(mask, values, 0.0)
    rows = max(totals.rows, 1.0)
    if mode == "token_mean":
        return masked.sum() / max(totals.tokens, 1.0)
    if mode == "local_token_mean":
        return masked.sum() / mask.sum().clamp(min=1) * (len(mask) / rows)
    if mode == "seq_mean_token_mean":
        return (masked.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / rows
    if mode == "seq_mean_token_sum":
        return masked.sum() / rows
    if mode == "trajectory_mean":
        rollout_tokens = mask.sum(-1) if trajectory_tokens is None else trajectory_tokens
        return (masked.sum(-1) / rollout_tokens.clamp(min=1)).sum() / (totals.trajectories or 1.0)
    if mode == "fixed":
        if norm_len is None:
            raise ValueError("aggregation `fixed` needs norm_len, a constant length such as max_new_tokens")
        return masked.sum() / (rows * norm_len)
    raise ValueError(f"unknown aggregation: {mode}")
