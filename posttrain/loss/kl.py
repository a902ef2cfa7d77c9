"""Per-token estimators of the KL divergence to the reference policy, from samples of the policy.

With d = logp - ref_logp. Each estimator suits one use: in the loss or in the reward (Schulman, "Approximating KL
divergence"). All take (batch, logp [N,T]) and return values [N,T], 0 where the mask is 0. A missing ref_logp is an
error.

Shapes: logp, values and stats [N,T].
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.errors import NonFiniteError
from posttrain.loss.clip import limit_value, token_ratio
from posttrain.registry import register

D_LIMIT = 20.0
K3_RANGE = (-2.610868638149878, 10.999983298020254)  # values of d at which exp(-d) + d - 1 is 10, verl's limit


@register("kl", "k1", needs=("ref_logp",))
def k1(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Return d itself, which is unbiased and noisy, and may be negative.

    For the reward only: in a loss its gradient is 1, whatever ref_logp is.
    """
    return _token_kl(log_ratio_to_reference(batch, logp))


@register("kl", "k2", needs=("ref_logp",))
def k2(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute d^2 / 2: a biased value, whose gradient on the policy's own samples, d, is that of the reverse KL."""
    return _token_kl(log_ratio_to_reference(batch, logp).square() / 2)


@register("kl", "k3", paper="2402.03300", needs=("ref_logp",))
def k3(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute exp(-d) + d - 1 >= 0: unbiased, low variance.

    On average its gradient 1 - exp(-d) is that of the forward KL. The value is limited to 10, as in verl (`kl/clamped`
    counts it). In verl the gradient is 0 there, and a token that is 13 times rarer than under the reference is not
    pulled back; here the gradient is that at the limit, -12.6 or 1.
    """
    d = log_ratio_to_reference(batch, logp)
    clamped = (d.detach() <= K3_RANGE[0]) | (d.detach() >= K3_RANGE[1])
    d = limit_value(d, *K3_RANGE)
    return _token_kl((-d).exp() + d - 1, clamped)


@register("kl", "k1_straight_through", needs=("ref_logp",))
def k1_straight_through(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute the value d of k1 with the gradient d of k2: on own samples, the reverse KL of each token.

    Later tokens get no credit. With a teacher as `kl.reference`: on-policy distillation from its log-probs. In the
    gradient |d| is limited to 20, so that a token which the teacher rules out does not dominate (this project's
    choice).
    """
    d = log_ratio_to_reference(batch, logp)
    pull = d.detach().clamp(-D_LIMIT, D_LIMIT) * (d - d.detach())
    return _token_kl(d.detach() + pull, clamped=d.detach().abs() >= D_LIMIT)


@register("kl", "full", needs=("ref_hidden", "divergence"))
def full(batch: RolloutBatch, logp: Tensor, *, beta: float = 1.0) -> TokenLoss:
    """Compute the exact divergence of each position over the whole vocabulary, with a gradient to all of its tokens.

    With a teacher as `kl.reference`: on-policy distillation as in GKD (2306.13649). beta 1: KL(policy || reference); 0:
    KL(reference || policy); in between the mixture of `full_distill`. At the rollouts' temperature. Both heads run
    chunk by chunk, from the reference's hidden states, which are stored for the step: its width x 4 bytes per token.
    Raises ValueError for a batch without `divergence`.
    """
    del beta, logp  # already used by the pass that computed `batch.divergence` (`train/policy.teacher_of`)
    if batch.divergence is None:
        raise ValueError("the batch has no divergence: this term needs the reference's hidden states")
    return _token_kl(torch.where(batch.mask, batch.divergence, 0.0))


@register("kl", "abs", needs=("ref_logp",))
def absolute(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute |d|, with gradient sign(d)."""
    return _token_kl(log_ratio_to_reference(batch, logp).abs())


@register("kl", "k3_straight_through", needs=("ref_logp",))
def k3_straight_through(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute k3 with the gradient d of k2 (verl's "k3+"): low variance, gradient of the reverse KL."""
    found, half_square = k3(batch, logp), log_ratio_to_reference(batch, logp).square() / 2
    return dataclasses.replace(found, values=found.values.detach() + (half_square - half_square.detach()))


@register("kl", "k3_is", paper="2512.02556", needs=("ref_logp",))
def k3_is(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute r * k3 with r = exp(logp - old_logp), gradient through both: r * d, the reverse KL also if r is not 1.

    k3 is limited to 10 as in `k3`, which limits d in the gradient to [-2.6, 11]. Without a gradient of k3 beyond its
    limit, only that of r would remain, which drives a rare token further away.
    """
    found = k3(batch, logp)
    values = token_ratio(batch, logp) * found.values
    return dataclasses.replace(found, values=values, stats={**found.stats, "kl": values.detach()})


def log_ratio_to_reference(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """Return d = logp - ref_logp [N,T], 0 where the mask is 0.

    Raises ValueError for a batch without ref_logp, NonFiniteError if it is NaN for a trained token.
    """
    if batch.ref_logp is None:
        raise ValueError("the batch has no ref_logp: a KL term needs the reference policy's log-probs")
    reference = torch.where(batch.mask, batch.ref_logp.detach(), 0.0)
    if reference.isnan().any():
        raise NonFiniteError("ref_logp is NaN for a trained token; a missing reference is not a KL of 0")
    return torch.where(batch.mask, logp, 0.0) - reference


def _token_kl(values: Tensor, clamped: Tensor | None = None) -> TokenLoss:
    """Return KL values as a TokenLoss with their stats."""
    stats = {"kl": values.detach()}
    if clamped is not None:
        stats["kl/clamped"] = clamped.to(values.dtype)
    return TokenLoss(values, stats)
