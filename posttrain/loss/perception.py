"""What a policy says under a changed image: it is to depend on what the image shows, and not on its noise.

Shapes: N rows, T completion tokens of the longest.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.registry import register

LARGEST = 10.0  # nats a token of a divergence that counts


@register(
    "regulariser",
    "masked_kl",
    paper="2507.06448",
    needs=("masked_logp",),
    note=(
        "Read from a summary of the paper. The pass with masked images is made once a step, before its first update,"
        " and has no gradient; black squares and the bound of 10 are ours."
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
    """PAPO's perception term, -(r - ln r - 1) with r = exp(logp - masked_logp): the policy is to depend on the image.

    r compares the sampled token under the image and under one with a part taken away: a share `ratio` of its squares of
    `patch` pixels is black, all of it is blurred by `patch` pixels, or blank. A positive coef (the authors: 0.01 to
    0.02) raises the divergence, which pays up to 10 nats a token. Rows without images have none. Stat [N,T]:
    `masked_kl`. Raises ValueError for a batch without masked_logp.
    """
    del how, ratio, patch  # the pass over masked images has used them
    if batch.masked_logp is None:
        raise ValueError("masked_kl needs the log-probs under masked images")
    gap = _gap(batch, logp, batch.masked_logp)
    values = torch.where(batch.mask, (gap.exp() - gap - 1).clamp(max=LARGEST), 0.0)
    return TokenLoss(-values, {"masked_kl": values.detach()})


@register(
    "regulariser",
    "perturbed_kl",
    paper="2601.06801",
    needs=("perturbed_logp",),
    note=(
        "Read from summaries of the paper. The pass with noisy images is made once a step, before its first update, and"
        " has no gradient; the strength of the noise and the bound of 10 are ours."
    ),
)
def perturbed_kl(batch: RolloutBatch, logp: Tensor, *, noise: float = 0.1) -> TokenLoss:
    """exp(-d) + d - 1 with d = logp - perturbed_logp: what the policy says is not to depend on noise in the image.

    The second pass shows sqrt(1 - noise) times the image plus sqrt(noise) times Gaussian noise, pixels from -1 to 1, as
    a diffusion adds it. At most 10 nats a token. Rows without images have none. Stat [N,T]: `perturbed_kl`. Raises
    ValueError for a batch without perturbed_logp.
    """
    del noise  # the pass over noisy images has used it
    if batch.perturbed_logp is None:
        raise ValueError("perturbed_kl needs the log-probs under noisy images")
    gap = _gap(batch, logp, batch.perturbed_logp)
    values = torch.where(batch.mask, ((-gap).exp() + gap - 1).clamp(max=LARGEST), 0.0)
    return TokenLoss(values, {"perturbed_kl": values.detach()})


def _gap(batch: RolloutBatch, logp: Tensor, changed: Tensor) -> Tensor:
    """logp - changed [N,T] within 20 nats, 0 where the mask is 0."""
    own = torch.where(batch.mask, logp, 0.0)
    return (own - torch.where(batch.mask, changed.detach().to(logp.dtype), 0.0)).clamp(-20.0, 20.0)
