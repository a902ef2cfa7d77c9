"""An invented method: the ratio saturates smoothly where PPO cuts it. Nobody claims that it helps."""

from torch import Tensor, tanh, where

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import token_advantages, token_ratio


def soft_ratio(batch: RolloutBatch, logp: Tensor, *, width: float = 0.2) -> TokenLoss:
    """-A (1 + width * tanh((r - 1) / width)) with r = exp(logp - old_logp). logp [N,T] -> values [N,T].

    Near r = 1 this is the plain surrogate; its gradient fades with the distance, on both sides and for both signs of A,
    and is never cut. width: the largest move of the ratio that still counts. Stats [N,T]: `ratio`, and `faded`, the
    share of the gradient that is lost.
    """
    ratio = token_ratio(batch, logp)
    saturated = tanh((ratio - 1) / width)
    values = -token_advantages(batch, logp) * (1 + width * saturated)
    stats = {"ratio": ratio.detach(), "faded": saturated.detach().square()}
    return TokenLoss(where(batch.mask, values, 0.0), stats)
