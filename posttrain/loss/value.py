"""Value losses of a critic: clipped squared errors, and a pessimistic combination of two heads."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.registry import register


@register("regulariser", "value", paper="1707.06347", needs=("values", "new_values", "returns", "every_row"))
def value(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    clip: float = 0.5,
    reduce: Literal["max", "mean"] = "max",
    huber: float | None = None,
) -> TokenLoss:
    """Compute half the clipped squared error of the critic per token (verl: clip 0.5, coef 0.1, token_mean).

    max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2) / 2, v the critic now, v_old at rollout time, R the
    return computed by the advantage function; tokens with R = NaN are excluded. reduce `mean`: the mean of the two
    errors, as in SAFE; huber d: the error is x^2 / 2 up to d and d (|x| - d / 2) beyond, instead of x^2 / 2. logp and
    values [N,T]; stat [N,T]: `value/error` (v - R). Raises ValueError for a batch without old and new values or
    returns.
    """
    if batch.values is None or batch.new_values is None or batch.returns is None:
        raise ValueError("the value loss needs the critic's old and new values and the returns")
    known = batch.mask & ~batch.returns.isnan()
    new, old, target = (torch.where(known, x, 0.0) for x in (batch.new_values, batch.values, batch.returns))
    losses = clipped_value_loss(new, old.detach(), target.detach(), clip=clip, reduce=reduce, huber=huber)
    stats = {"value/error": (new - target).detach().to(logp.dtype)}
    return TokenLoss(torch.where(known, losses, 0.0), stats)


def clipped_value_loss(
    new: Tensor, old: Tensor, returns: Tensor, *, clip: float, reduce: str = "max", huber: float | None = None
) -> Tensor:
    """Compute the value loss of `value`, element by element, any shape."""
    near = old + (new - old).clamp(-clip, clip)
    free, bounded = _error(new, returns, huber), _error(near, returns, huber)
    return torch.maximum(free, bounded) if reduce == "max" else (free + bounded) / 2


def soft_minimum(first: Tensor, second: Tensor, *, alpha: float = 0.3) -> Tensor:
    """Compute -alpha (logsumexp(-first / alpha, -second / alpha) - ln 2), a pessimistic value of two heads, any shape.

    It lies in [min, min + alpha ln 2] and equals both if they agree.
    """
    return -alpha * (torch.logaddexp(-first / alpha, -second / alpha) - math.log(2))


def _error(value: Tensor, target: Tensor, huber: float | None) -> Tensor:
    """Return half the squared error, or the Huber loss."""
    if huber is None:
        return (value - target).square() / 2
    return huber_loss(value, target, reduction="none", delta=huber)
