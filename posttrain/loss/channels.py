"""Clipped losses of a multi-channel advantage: a separate loss per channel (HDPO's efficiency) or their sum (COPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import clip, clipped_surrogate, token_ratio
from posttrain.registry import register


@register("regulariser", "channel_clip", paper="2604.08545", needs=("channels",))
def channel_clip(
    batch: RolloutBatch, logp: Tensor, *, channel: int = 1, clip_low: float = 0.2, clip_high: float | None = None
) -> TokenLoss:
    """Compute the clipped surrogate of `batch.channels[channel]`, averaged over the tokens of rows where it is not 0.

    Rows that are not compared in this channel do not dilute its mean; a row that is exactly average is excluded too, as
    in the authors' code. logp [N,T] -> values [N,T]; 0 without such rows. Stat `loss`: the term per token.
    """
    advantages = batch.channels[str(channel)].detach().to(logp.dtype)[:, None]
    high = clip_low if clip_high is None else clip_high
    values = clipped_surrogate(token_ratio(batch, logp), advantages, clip_low, high)
    counted = batch.mask & (advantages != 0)
    values = torch.where(counted, values, 0.0)
    return TokenLoss(values, {f"channel_{channel}/loss": values.detach()}, counted)


@register("loss", "clip_channels", paper="2508.04138", needs=("channels", "every_row"))
def clip_channels(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Compute the sum of `clip` over the channels of the advantage (COPO: group and batch), [N,T] -> values [N,T].

    A surrogate is proportional to its advantage, so a weight within the advantage is a weight of the surrogate. The
    result differs from one surrogate of the summed advantages only where some channels are clipped and others are not.
    Stats are those of the summed advantages. Raises ValueError for a batch without channels.
    """
    if not batch.channels:
        raise ValueError("the batch has no channels; an advantage such as `copo` gives them")
    keys = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    parts = [clip(batch.replace(advantages=a), logp, **keys).values for a in batch.channels.values()]
    values = parts[0]
    for part in parts[1:]:
        values = values + part
    return TokenLoss(values, clip(batch, logp.detach(), **keys).stats)
