"""The clipped policy-gradient surrogate of PPO, per token. GRPO, Dr. GRPO and DAPO share it and differ around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.errors import UserError
from posttrain.registry import register

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far beyond any use, and finite in float32 and bfloat16


@register("loss", "clip", paper="1707.06347")
def clip(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old_logp). logp [N,T] -> values [N,T].

    clip_low, clip_high: offsets from 1; clip_high defaults to clip_low, a larger one leaves more room to unlikely
    tokens (DAPO's clip-higher). dual_clip: where A < 0, at most dual_clip * |A|, so that one token with a huge ratio
    cannot rule the step (arXiv 1912.09729; verl has 3, TRL calls it delta); no gradient there; must exceed 1. The
    gradient flows through r only; without old_logp (one update a step) r is 1 and keeps its gradient. Stats [N,T]:
    `ratio`; `clip_ratio/low_mean`, `/high_mean`, `/region_mean`: 1 where the clip cuts the gradient (A < 0 and
    r < 1 - clip_low; A > 0 and r > 1 + clip_high; either), and with dual_clip `clip_ratio/dual_mean`. Raises UserError
    for a dual_clip of 1 or less.
    """
    high = clip_low if clip_high is None else clip_high
    ratio = token_ratio(batch, logp)
    advantages = token_advantages(batch, logp)
    values = clipped_surrogate(ratio, advantages, clip_low, high)
    stats = clip_stats(ratio, advantages, clip_low, high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise UserError(f"loss.dual_clip {dual_clip}", allowed="above 1, better above 1 + clip_high; 3 is usual")
        values = torch.where(advantages < 0, torch.minimum(values, -dual_clip * advantages), values)
        stats["clip_ratio/dual_mean"] = ((advantages < 0) & (ratio > dual_clip)).to(logp.dtype)
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), to be minimised; any shape."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def clip_stats(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """`ratio`, and where a clip cuts the gradient; what all clipped losses report.

    Tensors of any shape, [N,T] in the losses.
    """
    below = (advantages < 0) & (ratio < 1 - clip_low)
    above = (advantages > 0) & (ratio > 1 + clip_high)
    return {
        "ratio": ratio.detach(),
        "clip_ratio/low_mean": below.to(ratio.dtype),
        "clip_ratio/high_mean": above.to(ratio.dtype),
        "clip_ratio/region_mean": (below | above).to(ratio.dtype),
    }


def token_ratio(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """exp(logp - old_logp) [N,T], 1 where the mask is 0; the exponent is limited to +-20."""
    return bounded_exp(token_log_ratio(batch, logp))


def token_log_ratio(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """logp - old_logp [N,T], 0 where the mask is 0. Padding is cut away before the difference: inf - inf is NaN."""
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp.detach()
    return torch.where(batch.mask, logp, 0.0) - torch.where(batch.mask, old_logp, 0.0)


def token_advantages(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """The batch's advantages, constant for the gradient, in the dtype of logp and of a shape that goes with [N,T].

    Raises ValueError for a batch without advantages.
    """
    if batch.advantages is None:
        raise ValueError("the batch has no advantages; they are assigned before the loss")
    advantages = batch.advantages.detach().to(logp.dtype)
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else torch.where(batch.mask, advantages, 0.0)


def behaviour_logp(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """What the engine reported [N,T]; old_logp (or the current log-prob) where it reported none; 0 where masked."""
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp.detach()
    known = old_logp if batch.rollout_logp is None else batch.rollout_logp.detach().to(logp.dtype)
    return torch.where(batch.mask, torch.where(known.isnan(), old_logp, known), 0.0)


def log_ratio_to_behaviour(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """logp - what the engine reported [N,T], 0 where the mask is 0."""
    return torch.where(batch.mask, logp, 0.0) - behaviour_logp(batch, logp)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with the exponent limited to +-20; nothing flows back beyond that. Takes any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class _Limited(torch.autograd.Function):
    """`clamp` whose gradient is 0 beyond the limits only where it leads further out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        outward = ((x > ctx.high) & (grad < 0)) | ((x < ctx.low) & (grad > 0))  # descent goes against the gradient
        return grad.masked_fill(outward, 0.0), None, None


def limit_value(x: Tensor, low: float, high: float) -> Tensor:
    """x, of any shape, within [low, high]. Beyond, a loss of it keeps the value and the gradient that it has at the
    limit, unless that gradient would drive x further out.

    `clamp` has no gradient there: a penalty that has run into its limit would no longer pull anything back.
    """
    found: Tensor = _Limited.apply(x, low, high)  # type: ignore[no-untyped-call]
    return found
