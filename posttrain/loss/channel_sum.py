"""A clipped surrogate for each channel of the advantage, added up."""

from __future__ import annotations

from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import clip
from posttrain.registry import register


@register("loss", "clip_channels", paper="2508.04138", needs=("channels", "every_row"))
def clip_channels(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """The sum of `clip` over the channels of the advantage (COPO: the group's and the batch's), [N,T] -> values [N,T].

    A surrogate is proportional to its advantage, so a weight within the advantage is a weight of the surrogate. Differs
    from one surrogate of the summed advantages only where one channel is clipped and another is not. Stats are those of
    the sum.
    """
    if not batch.channels:
        raise ValueError("the batch has no channels; an advantage such as `copo` gives them")
    keys = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    parts = [clip(batch.replace(advantages=a), logp, **keys).values for a in batch.channels.values()]
    values = parts[0]
    for part in parts[1:]:
        values = values + part
    return TokenLoss(values, clip(batch, logp.detach(), **keys).stats)
