"""A clipped loss of its own for a channel of the advantage (HDPO's efficiency channel)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import clipped_surrogate, token_ratio
from posttrain.registry import register


@register("regulariser", "channel_clip", paper="2604.08545", needs=("channels",))
def channel_clip(
    batch: RolloutBatch, logp: Tensor, *, channel: int = 1, clip_low: float = 0.2, clip_high: float | None = None
) -> TokenLoss:
    """The clipped surrogate of `batch.channels[channel]`, averaged over the tokens of the rows where it is not 0.

    Rows that are not compared in this channel do not dilute its mean; a row that is exactly average leaves it too, as
    in the authors' code. logp [N,T] -> values [N,T]; no row: 0. Stat `loss`: the term by token.
    """
    advantages = batch.channels[str(channel)].detach().to(logp.dtype)[:, None]
    high = clip_low if clip_high is None else clip_high
    values = clipped_surrogate(token_ratio(batch, logp), advantages, clip_low, high)
    counted = batch.mask & (advantages != 0)
    values = torch.where(counted, values, 0.0)
    return TokenLoss(values, {f"channel_{channel}/loss": values.detach()}, counted)
