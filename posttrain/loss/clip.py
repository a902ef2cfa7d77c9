"""PPO's clipped policy-gradient surrogate per token, shared by GRPO, Dr. GRPO and DAPO, and its ratios."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.errors import UserError
from posttrain.registry import register

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: beyond any useful ratio, and finite in float32 and bfloat16


@register("loss", "clip", paper="1707.06347")
def clip(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Compute the PPO surrogate max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logp - old_logp), [N,T].

    clip_low, clip_high: offsets from 1; clip_high defaults to clip_low; a larger one leaves more room to unlikely
    tokens (DAPO's clip-higher). dual_clip: if A < 0, limits the loss to dual_clip * |A|, so that one token with a huge
    ratio cannot dominate the step (arXiv 1912.09729; verl uses 3, TRL calls it delta); beyond it the gradient is 0;
    must exceed 1. The gradient flows only through r; without old_logp (one update per step) r is 1 and keeps its
    gradient. Stats [N,T]: `ratio`; `clip_ratio/low_mean`, `/high_mean`, `/region_mean`: 1 where the clip removes the
    gradient (A < 0 and r < 1 - clip_low; A > 0 and r > 1 + clip_high; either), and with dual_clip
    `clip_ratio/dual_mean`. Raises UserError for a dual_clip of 1 or less.
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
    """Compute max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), to be minimized; any shape."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def clip_stats(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Return `ratio` and the indicators of clipped gradients that all clipped losses report.

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
    """Return exp(logp - old_logp) [N,T], 1 where the mask is 0; the exponent is limited to +-20."""
    return bounded_exp(token_log_ratio(batch, logp))


def token_log_ratio(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """Return logp - old_logp [N,T], 0 where the mask is 0. Padding is masked before subtracting: inf - inf is NaN."""
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp.detach()
    return torch.where(batch.mask, logp, 0.0) - torch.where(batch.mask, old_logp, 0.0)


def token_advantages(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """Return the batch's advantages, detached, in the dtype of logp and in a shape that broadcasts to [N,T].

    Raises ValueError for a batch without advantages.
    """
    if batch.advantages is None:
        raise ValueError("the batch has no advantages; they are assigned before the loss")
    advantages = batch.advantages.detach().to(logp.dtype)
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else torch.where(batch.mask, advantages, 0.0)


def behavior_logp(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """Return the log-probs reported by the engine [N,T], 0 where masked.

    Where the engine reported none, old_logp stands in, or the detached logp without old_logp.
    """
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp.detach()
    known = old_logp if batch.rollout_logp is None else batch.rollout_logp.detach().to(logp.dtype)
    return torch.where(batch.mask, torch.where(known.isnan(), old_logp, known), 0.0)


def log_ratio_to_behavior(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """Return logp minus the log-probs reported by the engine [N,T], 0 where the mask is 0."""
    return torch.where(batch.mask, logp, 0.0) - behavior_logp(batch, logp)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp with the exponent limited to +-20; the gradient is 0 beyond. Takes any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class _InwardClamp(torch.autograd.Function):
    """Clamp whose gradient beyond the limits is removed only if it leads further outside."""

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
    """Clamp x, of any shape, to [low, high], but keep gradients that lead back inside.

    Beyond a limit, a loss of the result keeps the value and gradient at the limit, unless that gradient would drive x
    further out. Plain `clamp` has no gradient there, so a penalty that reached its limit could no longer pull x back.
    """
    limited: Tensor = _InwardClamp.apply(x, low, high)  # type: ignore[no-untyped-call]
    return limited
