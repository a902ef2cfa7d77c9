"""REINFORCE losses: minus advantage times log-prob, with a detached weight or none.

The value of these losses is not a distance; only their gradient is meaningful.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import token_advantages, token_ratio
from posttrain.registry import register


@register("loss", "reinforce")
def reinforce(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute -A logp per token; gradient -A. Nothing is clipped: add a correction for off-policy samples.

    logp and values [N,T]. Under aggregation `seq_mean_token_sum` this is the policy gradient of the sequence reward.
    Stat [N,T]: `ratio`. Source: Williams, 1992.
    """
    values = -token_advantages(batch, logp) * torch.where(batch.mask, logp, 0.0)
    return TokenLoss(torch.where(batch.mask, values, 0.0), {"ratio": token_ratio(batch, logp).detach()})


@register("loss", "cispo", paper="2506.13585")
def cispo(
    batch: RolloutBatch, logp: Tensor, *, ratio_min: float | None = None, ratio_max: float | None = 5.0
) -> TokenLoss:
    """Compute -sg[clamp(r, ratio_min, ratio_max)] A logp with r = exp(logp - old_logp): every token keeps a gradient.

    ratio_min, ratio_max: bounds of the ratio itself (not offsets from 1, as in verl); None = no bound. The paper tunes
    the upper one and does not state it; TRL suggests 5. If old_logp is the engine's, r includes the engine mismatch: do
    not add a correction. Stats [N,T]: `weights`, `ratio`, `clip_ratio/region_mean` (share at a bound).
    """
    ratio = token_ratio(batch, logp).detach()
    weights = ratio if ratio_min is None and ratio_max is None else ratio.clamp(ratio_min, ratio_max)
    values = -weights * token_advantages(batch, logp) * torch.where(batch.mask, logp, 0.0)
    stats = {
        "weights": torch.where(batch.mask, weights, 0.0),
        "ratio": ratio,
        "clip_ratio/region_mean": (weights != ratio).to(logp.dtype),
    }
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)
