"""From a token matrix to one number, with one denominator: that of the whole optimiser batch.

A micro-batch gives `its sum / the batch's total`, and the parts are added; nothing is divided a second time. So the
loss and its gradient do not depend on how a batch is cut.
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
    """Trained tokens and rows of one optimiser batch, over all its micro-batches and ranks.

    groups, weight: number of groups and their weights added up, for losses over groups. terms: of terms with a mean of
    their own, name -> tokens that it is over. trajectories: rollouts of several rows; of one of which the batch has a
    part, that share of its tokens.
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
    """Count a mask [N,T]. Rows without a trained token stay in the row count unless `count_empty_rows` is False.

    Leaving them out (verl) makes the other rows weigh more whenever tokens are masked; keeping them (TRL) does not.
    trajectory_tokens [N]: trained tokens of the rollout that a row is a part of; None = each row is all of it.
    """
    lengths = mask.bool().sum(-1)
    rows = lengths.numel() if count_empty_rows else int((lengths > 0).sum())
    whole = lengths if trajectory_tokens is None else trajectory_tokens
    trajectories = float((lengths / whole.clamp(min=1)).sum())
    return Totals(float(lengths.sum()), float(rows), trajectories=trajectories)


def count_trajectory_tokens(mask: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Trained tokens [N] of the rollout that each row belongs to. mask [N,T], trajectory_ids [N], any integers."""
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
    """The scalar that these rows add to the loss. values, mask [N,T]; what cells with mask 0 hold never matters.

    token_mean           sum / tokens                     each token weighs the same (DAPO)
    seq_mean_token_mean  row means / rows                 each row weighs the same (GRPO)
    seq_mean_token_sum   row sums / rows                  policy gradient of the sequence reward
    fixed                row sums / (rows * norm_len)     Dr. GRPO; norm_len is a constant, not the longest row
    local_token_mean    sum / tokens of these rows        TRL's bnpo: depends on the micro-batches, which weigh by rows
    trajectory_mean      rollout means / rollouts         each rollout weighs the same, however many rows it has
                                                          (Delethink); one without a trained token is not counted
    trajectory_tokens [N]: see `totals`. An empty batch gives 0, still attached to the graph. Raises ValueError for an
    unknown mode or a missing norm_len.
    """
    mask = mask.bool()
    chosen = torch.where(mask, values, 0.0)
    rows = max(totals.rows, 1.0)
    if mode == "token_mean":
        return chosen.sum() / max(totals.tokens, 1.0)
    if mode == "local_token_mean":
        return chosen.sum() / mask.sum().clamp(min=1) * (len(mask) / rows)
    if mode == "seq_mean_token_mean":
        return (chosen.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / rows
    if mode == "seq_mean_token_sum":
        return chosen.sum() / rows
    if mode == "trajectory_mean":
        whole = mask.sum(-1) if trajectory_tokens is None else trajectory_tokens
        return (chosen.sum(-1) / whole.clamp(min=1)).sum() / (totals.trajectories or 1.0)
    if mode == "fixed":
        if norm_len is None:
            raise ValueError("aggregation `fixed` needs norm_len, a constant length such as max_new_tokens")
        return chosen.sum() / (rows * norm_len)
    raise ValueError(f"unknown aggregation: {mode}")
