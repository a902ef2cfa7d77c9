"""REINFORCE losses: minus advantage times log-prob, with a detached weight or none.

The value of these losses is not a distance; only their gradient is meaningful.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import LOG_RATIO_LIMIT, token_advantages, token_log_ratio, token_ratio
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


@register("loss", "vespo", paper="2602.10693")
def vespo(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLoss:
    """Compute -sg[w^k exp(l (1 - w))] A logp, w = exp(sum over the row of logp - old_logp): a soft weight by row.

    k and l are k_pos and lambda_pos where A >= 0, else k_neg and lambda_neg. The weight is 1 for w = 1, largest at
    w = k / l, and falls to 0 for rows that the policy now finds far less or far more likely: k sets how fast to the
    left, l to the right. w is a product over all tokens of the row, without division by its length. logp and values
    [N,T]; stats: `seq_ratio` [N] (w), `weights` [N,T].
    """
    advantages = token_advantages(batch, logp)
    log_ratio = token_log_ratio(batch, logp).detach().sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k, decay = torch.where(advantages >= 0, k_pos, k_neg), torch.where(advantages >= 0, lambda_pos, lambda_neg)
    seq_ratio = log_ratio.exp()
    weights = (k * log_ratio[:, None] + decay * (1 - seq_ratio[:, None])).exp().to(logp.dtype).expand(logp.shape)
    values = torch.where(batch.mask, -weights * advantages * torch.where(batch.mask, logp, 0.0), 0.0)
    return TokenLoss(values, {"seq_ratio": seq_ratio, "weights": weights})
