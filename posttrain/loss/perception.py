"""Regularisers on the policy under a changed image: it should depend on the image's content, but not on noise.

Shapes: N rows, T completion tokens of the longest row; logp and values [N,T].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.registry import register

MAX_DIVERGENCE = 10.0  # upper limit of a token's divergence, in nats


@register(
    "regulariser",
    "masked_kl",
    paper="2507.06448",
    needs=("masked_logp",),
    note=(
        "Based on a summary of the paper. The pass with masked images runs once per step, before its first update,"
        " without gradient; black squares and the limit of 10 are this project's choice."
    ),
)
def masked_kl(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    how: Literal["mask", "blur", "blank"] = "mask",
    ratio: float = 0.6,
    patch: int = 14,
) -> TokenLoss:
    """Compute PAPO's perception term -(r - ln r - 1), r = exp(logp - masked_logp).

    It makes the policy depend on the image. r compares the sampled token under the image and under a degraded image: a
    share `ratio` of its squares of `patch` pixels is black, the whole image is blurred by `patch` pixels, or it is
    blank. A positive coef (the authors: 0.01 to 0.02) raises the divergence, which is rewarded up to 10 nats per token.
    Rows without images have no term. Stat [N,T]: `masked_kl`. Raises ValueError for a batch without masked_logp.
    """
    del how, ratio, patch  # already used by the pass over masked images
    if batch.masked_logp is None:
        raise ValueError("masked_kl needs the log-probs under masked images")
    gap = _log_ratio(batch, logp, batch.masked_logp)
    values = torch.where(batch.mask, (gap.exp() - gap - 1).clamp(max=MAX_DIVERGENCE), 0.0)
    return TokenLoss(-values, {"masked_kl": values.detach()})


@register(
    "regulariser",
    "perturbed_kl",
    paper="2601.06801",
    needs=("perturbed_logp",),
    note=(
        "Based on summaries of the paper. The pass with noisy images runs once per step, before its first update,"
        " without gradient; the strength of the noise and the limit of 10 are this project's choice."
    ),
)
def perturbed_kl(batch: RolloutBatch, logp: Tensor, *, noise: float = 0.1) -> TokenLoss:
    """Compute exp(-d) + d - 1 with d = logp - perturbed_logp: the policy should not depend on noise in the image.

    The second pass shows sqrt(1 - noise) times the image plus sqrt(noise) times Gaussian noise, pixels from -1 to 1, as
    a diffusion process adds it. At most 10 nats per token. Rows without images have no term. Stat [N,T]:
    `perturbed_kl`. Raises ValueError for a batch without perturbed_logp.
    """
    del noise  # already used by the pass over noisy images
    if batch.perturbed_logp is None:
        raise ValueError("perturbed_kl needs the log-probs under noisy images")
    gap = _log_ratio(batch, logp, batch.perturbed_logp)
    values = torch.where(batch.mask, ((-gap).exp() + gap - 1).clamp(max=MAX_DIVERGENCE), 0.0)
    return TokenLoss(values, {"perturbed_kl": values.detach()})


def _log_ratio(batch: RolloutBatch, logp: Tensor, changed: Tensor) -> Tensor:
    """Return logp - changed [N,T] limited to +-20 nats, 0 where the mask is 0."""
    current = torch.where(batch.mask, logp, 0.0)
    return (current - torch.where(batch.mask, changed.detach().to(logp.dtype), 0.0)).clamp(-20.0, 20.0)
