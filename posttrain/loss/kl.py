"""Estimates of the KL divergence to the reference policy, per token, from samples of the policy.

With d = logp - ref_logp. Each is right for one place: say `in the loss` or `in the reward` (Schulman, "Approximating
KL divergence"). All take (batch, logp [N,T]) and return values [N,T], 0 where the mask is 0. A missing ref_logp is an
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
K3_RANGE = (-2.610868638149878, 10.999983298020254)  # where exp(-d) + d - 1 is 10, the guard of verl


@register("kl", "k1", needs=("ref_logp",))
def k1(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """d. Unbiased, noisy, may be negative. For the reward only: in a loss its gradient is 1, whatever ref_logp is."""
    return _token_kl(log_ratio_to_reference(batch, logp))


@register("kl", "k2", needs=("ref_logp",))
def k2(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """d^2 / 2. Biased value; its gradient d is, on the policy's own samples, that of the reverse KL."""
    return _token_kl(log_ratio_to_reference(batch, logp).square() / 2)


@register("kl", "k3", paper="2402.03300", needs=("ref_logp",))
def k3(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """exp(-d) + d - 1 >= 0. Unbiased, low variance. Its gradient 1 - exp(-d) is on average that of the forward KL.

    The value is limited to 10, as in verl (`kl/clamped` counts it). In verl the gradient is 0 there, and a token that
    is 13 times rarer than under the reference is not pulled back; here it stays that at the limit, -12.6 or 1.
    """
    d = log_ratio_to_reference(batch, logp)
    clamped = (d.detach() <= K3_RANGE[0]) | (d.detach() >= K3_RANGE[1])
    d = limit_value(d, *K3_RANGE)
    return _token_kl((-d).exp() + d - 1, clamped)


@register("kl", "k1_straight_through", needs=("ref_logp",))
def k1_straight_through(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """The value of k1, d, with the gradient of k2, also d: on the policy's own samples that of the reverse KL of each
    token, with no credit for later ones. With `kl.reference` a teacher, on-policy distillation from its log-probs.

    In the gradient |d| is limited to 20, so that a token which the teacher rules out does not decide alone (ours).
    """
    d = log_ratio_to_reference(batch, logp)
    pull = d.detach().clamp(-D_LIMIT, D_LIMIT) * (d - d.detach())
    return _token_kl(d.detach() + pull, clamped=d.detach().abs() >= D_LIMIT)


@register("kl", "full", needs=("ref_hidden", "divergence"))
def full(batch: RolloutBatch, logp: Tensor, *, beta: float = 1.0) -> TokenLoss:
    """The exact divergence of each position over the whole vocabulary, with a gradient to all of its tokens. With
    `kl.reference` a teacher, on-policy distillation as GKD has it (2306.13649).

    beta 1: KL(policy || reference); 0: KL(reference || policy); in between the mixture of `full_distill`. At the
    rollouts' temperature. Both heads are run chunk by chunk, from hidden states of the reference that are kept for the
    step: its width x 4 bytes a token. Raises ValueError for a batch without `divergence`.
    """
    del beta, logp  # the pass has made it of them (`train/policy.teacher_of`)
    if batch.divergence is None:
        raise ValueError("the batch has no divergence: this term needs the reference's hidden states")
    return _token_kl(torch.where(batch.mask, batch.divergence, 0.0))


@register("kl", "abs", needs=("ref_logp",))
def absolute(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """|d|, with gradient sign(d)."""
    return _token_kl(log_ratio_to_reference(batch, logp).abs())


@register("kl", "k3_straight_through", needs=("ref_logp",))
def k3_straight_through(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """The value of k3 with the gradient of k2, d (verl's "k3+"): low variance to look at, reverse KL to follow."""
    found, half_square = k3(batch, logp), log_ratio_to_reference(batch, logp).square() / 2
    return dataclasses.replace(found, values=found.values.detach() + (half_square - half_square.detach()))


@register("kl", "k3_is", paper="2512.02556", needs=("ref_logp",))
def k3_is(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """r * k3 with r = exp(logp - old_logp), gradient through both: r * d, the reverse KL also when r is not 1.

    k3 is limited to 10 as in `k3`, which limits d in the gradient to [-2.6, 11]. With no gradient of k3 beyond its
    limit that of r alone is left, which drives a rare token further away.
    """
    found = k3(batch, logp)
    values = token_ratio(batch, logp) * found.values
    return dataclasses.replace(found, values=values, stats={**found.stats, "kl": values.detach()})


def log_ratio_to_reference(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """d = logp - ref_logp [N,T], 0 where the mask is 0. Raises if a trained token has no reference log-prob.

    Raises ValueError for a batch without ref_logp, NonFiniteError where it is NaN for a trained token.
    """
    if batch.ref_logp is None:
        raise ValueError("the batch has no ref_logp: a KL term needs the reference policy's log-probs")
    reference = torch.where(batch.mask, batch.ref_logp.detach(), 0.0)
    if reference.isnan().any():
        raise NonFiniteError("ref_logp is NaN for a trained token; a missing reference is not a KL of 0")
    return torch.where(batch.mask, logp, 0.0) - reference


def _token_kl(values: Tensor, clamped: Tensor | None = None) -> TokenLoss:
    stats = {"kl": values.detach()}
    if clamped is not None:
        stats["kl/clamped"] = clamped.to(values.dtype)
    return TokenLoss(values, stats)
