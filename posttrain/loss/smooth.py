"""Surrogates that bound the ratio without a hard edge at r = 1 +- epsilon."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import token_advantages, token_log_ratio, token_ratio
from posttrain.registry import register


@register("loss", "sapo", paper="2511.20347")
def sapo(batch: RolloutBatch, logp: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), r = exp(logp - old_logp): a gate that fades instead of a clip.

    tau is tau_pos where A > 0, else tau_neg; a larger one fades faster, and the paper fades updates that lower
    probabilities more. The gradient by logp is -A r g with the gate g = 4 p (1 - p), p = sigmoid(tau (r - 1)): g is 1
    on-policy and falls on both sides of r = 1, so a token whose ratio has moved too far is not cut off but counts less.
    logp and values [N,T]; stats [N,T]: `ratio`, `gate` (g).
    """
    advantages, ratio = token_advantages(batch, logp), token_ratio(batch, logp)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(logp.dtype)
    share = torch.sigmoid(tau * (ratio - 1))
    values = torch.where(batch.mask, -advantages * share * 4 / tau, 0.0)
    return TokenLoss(values, {"ratio": ratio.detach(), "gate": (4 * share * (1 - share)).detach()})


@register("loss", "mhpo", paper="2603.16929", note="Based on two agreeing summaries of the paper.")
def mhpo(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    c: float = 1.5,
    k_pos: float = 1.5,
    lambda_pos: float = 1.0,
    k_neg: float = 2.0,
    lambda_neg: float = 0.8,
    normalize_hazard: bool = False,
) -> TokenLoss:
    """Compute -A exp(psi - sg[zeta]): a bounded log-ratio with separate hazard penalties for increases and decreases.

    psi = c tanh((logp - old_logp) / c); zeta = (softplus(psi) / lambda_pos)^k_pos + (softplus(-psi) /
    lambda_neg)^k_neg. The gradient's factor never exceeds e^c. On-policy it is exp(-zeta(0)), 0.265 with these defaults
    instead of 1: raise the learning rate, or set normalize_hazard, which subtracts zeta(0) (the paper does not do
    this). Stats [N,T]: `psi`, `zeta`, `ratio` (exp(psi - zeta)).
    """

    def hazard(x: Tensor) -> Tensor:
        return (softplus(x) / lambda_pos) ** k_pos + (softplus(-x) / lambda_neg) ** k_neg

    psi = c * torch.tanh(token_log_ratio(batch, logp) / c)
    zeta = hazard(psi.detach())
    if normalize_hazard:
        zeta = zeta - hazard(torch.zeros_like(zeta))
    ratio = (psi - zeta).exp()
    values = torch.where(batch.mask, -token_advantages(batch, logp) * ratio, 0.0)
    stats = {"psi": psi.detach(), "zeta": torch.where(batch.mask, zeta, 0.0), "ratio": ratio.detach()}
    return TokenLoss(values, stats)


@register(
    "loss",
    "fiberpo",
    paper="2603.08239",
    note=(
        "The paper states no c_pos, c_neg and epsilon: the defaults are untested. The four-level form is not"
        " implemented."
    ),
)
def fiberpo(
    batch: RolloutBatch, logp: Tensor, *, c_pos: float = 0.12, c_neg: float = 0.10, epsilon: float = 0.03
) -> TokenLoss:
    """Compute -rho A with a gate on the drift of the whole row and a clip on each token's contribution. Experimental.

    With d = logp - old_logp, n trained tokens, s+ = sum of the positive d / n, s- = sum of the negative ones / -n, and
    l = +1 if d_t >= 0 (the paper does not define d_t = 0), else -1:

        base       = g(s+, c_pos) - g(s-, c_neg); g(x, C) = x up to C, (n+1) C - n x up to (1 + 1/n) C, 0 above
        residual_t = clip(d_t - l s^l, +-epsilon) - clip(-l s^-l, +-epsilon)
        rho_t      = exp(base + residual_t)

    Nothing is detached: s+ and s- carry gradient to all tokens of their sign. Aggregation must be
    `seq_mean_token_mean`. Constraint of the paper: c_neg < c_pos, epsilon far below their sum. Stats: `base_log_weight`
    [N], `gated_ratio` [N,T].
    """
    d = token_log_ratio(batch, logp)
    nonnegative = d.detach() >= 0
    count = batch.mask.sum(-1).clamp(min=1).to(logp.dtype)
    up = torch.where(nonnegative, d, 0.0).sum(-1) / count
    down = torch.where(nonnegative, 0.0, -d).sum(-1) / count
    base = _gate(up, c_pos, count) - _gate(down, c_neg, count)
    own = torch.where(nonnegative, d - up[:, None], d + down[:, None])
    other = torch.where(nonnegative, -down[:, None], up[:, None])
    residual = own.clamp(-epsilon, epsilon) - other.clamp(-epsilon, epsilon)
    ratio = (base[:, None] + residual).exp()
    values = torch.where(batch.mask, -token_advantages(batch, logp) * ratio, 0.0)
    gated = torch.where(batch.mask, ratio.detach(), 0.0)
    return TokenLoss(values, {"base_log_weight": base.detach(), "gated_ratio": gated})


def _gate(drift: Tensor, limit: float, count: Tensor) -> Tensor:
    """Return drift [N] up to `limit`, then a ramp of slope -count down to 0, then 0."""
    ramp = (count + 1) * limit - count * drift
    return torch.where(drift <= limit, drift, torch.where(drift < (1 + 1 / count) * limit, ramp, 0.0))
