"""Clipped losses on the ratio of whole sequences, as token matrices that are constant along a row.

Aggregation `seq_mean_token_mean` gives the mean over rows, as these methods define it; other aggregations weight a row
by its length. LUSPO (arXiv 2602.05261) does this on purpose: it is `gspo` with `seq_mean_token_sum`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss, row_mean
from posttrain.loss.clip import (
    bounded_exp,
    clip_stats,
    clipped_surrogate,
    token_advantages,
    token_log_ratio,
)
from posttrain.registry import register


@register("loss", "gspo", paper="2507.18071")
def gspo(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    level: Literal["sequence", "token"] = "sequence",
    clip_low: float = 3e-4,
    clip_high: float | None = None,
) -> TokenLoss:
    """Compute the clipped surrogate on s = exp(mean over tokens of logp - old_logp).

    s is the geometric mean of a row's ratios. level `sequence`: clip(s) for every token of the row; gradient by each
    token -A s / tokens of the row, unless clipped. `token` (GSPO-token): value s, gradient by the token's own log-prob;
    allows per-token advantages. clip_low, clip_high: offsets from 1, about 1000 times smaller than GRPO's (3e-4 and
    4e-4 in the paper); clip_high defaults to clip_low. Whole rows are clipped, so the clipped share is much larger than
    in GRPO. An empty row has s = 1. logp and values [N,T]; stats: `seq_ratio` [N], and those of `clip`.
    """
    seq_ratio = bounded_exp(row_mean(token_log_ratio(batch, logp), batch.mask))
    if level == "sequence":
        ratio = seq_ratio[:, None].expand(logp.shape)
    else:
        current = torch.where(batch.mask, logp, 0.0)
        ratio = seq_ratio.detach()[:, None] * (current - current.detach()).exp()
    return _surrogate(batch, logp, ratio, seq_ratio, clip_low, clip_low if clip_high is None else clip_high)


@register("loss", "sequence_clip", paper="2402.14740")
def sequence_clip(
    batch: RolloutBatch, logp: Tensor, *, clip_low: float = 0.2, clip_high: float | None = None
) -> TokenLoss:
    """Compute the clipped surrogate on the product of a row's ratios, exp(sum over tokens of logp - old_logp) (RLOO).

    On-policy its gradient is -A / rows for every token: the token sum, not the mean. After several updates nearly every
    long row is clipped: make one update per step. clip_high defaults to clip_low. Stats: `seq_ratio` [N] and those of
    `clip`.
    """
    seq_ratio = bounded_exp(token_log_ratio(batch, logp).sum(-1))
    ratio = seq_ratio[:, None].expand(logp.shape)
    return _surrogate(batch, logp, ratio, seq_ratio, clip_low, clip_low if clip_high is None else clip_high)


@register("loss", "gmpo", paper="2507.20673")
def gmpo(batch: RolloutBatch, logp: Tensor, *, clip_low: float = 0.4, clip_high: float | None = None) -> TokenLoss:
    """Compute -A exp(mean over tokens of the clipped log-ratio): a geometric mean of ratios that are clipped by token.

    The log-ratio d = logp - old_logp is limited where the clip of PPO would act: to at most clip_high if A > 0, to at
    least -clip_low if A < 0. clip_low, clip_high: limits of d itself, so that the ratio of a token stays within
    exp(-clip_low) and exp(clip_high); clip_high defaults to clip_low. A clipped token has no gradient, but its limit
    counts in the ratio of the other tokens. Aggregation must be `seq_mean_token_mean`; with advantages [N,T] the row
    then has their mean, as in verl. An empty row has ratio 1. logp and values [N,T]; stats: `seq_ratio` [N], and those
    of `clip` for the tokens' ratios.
    """
    high = clip_low if clip_high is None else clip_high
    advantages = token_advantages(batch, logp)
    log_ratio = token_log_ratio(batch, logp)
    limited = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-clip_low))
    seq_ratio = bounded_exp(row_mean(limited, batch.mask))
    values = torch.where(batch.mask, -advantages * seq_ratio[:, None], 0.0)
    clipped = clip_stats(bounded_exp(log_ratio), advantages, 1 - math.exp(-clip_low), math.exp(high) - 1)
    return TokenLoss(values, {"seq_ratio": seq_ratio.detach(), **clipped})


def _surrogate(
    batch: RolloutBatch, logp: Tensor, ratio: Tensor, seq_ratio: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return the clipped surrogate of a ratio [N,T] with its stats."""
    advantages = token_advantages(batch, logp)
    values = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    stats = {"seq_ratio": seq_ratio.detach(), **clip_stats(ratio, advantages, clip_low, clip_high)}
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)
