"""Proximal losses: a KL penalty or a limit on a divergence to the sampling policy, instead of a clip of the ratio.

Shapes: logp, values and stats [N,T].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import (
    LOG_RATIO_LIMIT,
    behavior_logp,
    bounded_exp,
    limit_value,
    token_advantages,
    token_log_ratio,
    token_ratio,
)
from posttrain.registry import register

Estimator = Literal["is", "k2"]


@register(
    "loss",
    "mdpo",
    paper="2005.09814",
    needs=("every_row",),
    note="The form for tokens is an adaptation of a method for control tasks.",
)
def mdpo(batch: RolloutBatch, logp: Tensor, *, kl: Estimator = "is", t_min: float = 1e-3) -> TokenLoss:
    """Compute -A r + KL(pi || old) / t: mirror descent with a step size t that shrinks over the run; no clip.

    r = exp(logp - old_logp). kl `is`: r ln r - r + 1, with gradient r ln r; `k2`: (ln r)^2 / 2. In step k of K, t =
    max(1 - (k - 1) / K, t_min), so the last updates hardly change the policy, by design; the paper states no t_min.
    Make several updates per step (10 in the paper). Stats [N,T]: `ratio`, `kl_old`.
    """
    return mirror_step(batch, logp, iteration=batch.step + 1, total_iterations=batch.total_steps, kl=kl, t_min=t_min)


def mirror_step(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    iteration: int,
    total_iterations: int,
    kl: Estimator = "is",
    t_min: float = 1e-3,
) -> TokenLoss:
    """Compute -A r + KL(pi || old) / t per token, in an iteration counted from 1."""
    ratio, d = token_ratio(batch, logp), limit_value(token_log_ratio(batch, logp), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    distance = d.exp() * d - d.exp() + 1 if kl == "is" else d.square() / 2
    values = -token_advantages(batch, logp) * ratio + distance / step_size(iteration, total_iterations, t_min)
    return TokenLoss(torch.where(batch.mask, values, 0.0), {"ratio": ratio.detach(), "kl_old": distance.detach()})


def step_size(iteration: int, total_iterations: int, t_min: float = 1e-3) -> float:
    """Return max(1 - (iteration - 1) / total_iterations, t_min), iterations counted from 1."""
    return max(1 - (iteration - 1) / total_iterations, t_min)


@register("loss", "mdpo_sequence", paper="2501.12599", needs=("every_row",), note="The paper does not state tau.")
def mdpo_sequence(batch: RolloutBatch, logp: Tensor, *, tau: float = 0.1) -> TokenLoss:
    """Compute (A - tau S)^2 / (2 tau), S = sum over the row of logp - old_logp: online mirror descent (Kimi k1.5).

    Constant along the row: aggregate with `seq_mean_token_mean`. A is the centered reward (advantage `group`, scale
    none); the minimum is at S = A / tau. Gradient by each token at S = 0: -A / rows. Stats: `ratio`, `log_ratio_sum`
    [N].
    """
    log_ratio = token_log_ratio(batch, logp).sum(-1, keepdim=True)
    values = (token_advantages(batch, logp) - tau * log_ratio).square() / (2 * tau)
    stats = {"ratio": token_ratio(batch, logp).detach(), "log_ratio_sum": log_ratio.detach()[:, 0]}
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)


@register("regulariser", "kl_old", needs=("several_updates", "every_row"))
def kl_old(batch: RolloutBatch, logp: Tensor, *, estimator: Literal["k3", "k2", "is"] = "k3") -> TokenLoss:
    """Compute the KL to the policy at the start of the step per token, with d = logp - old_logp.

    `k3`: exp(-d) + d - 1 (TRPA, ReMix); `k2`: d^2 / 2; `is`: r ln r - r + 1, r = exp(d), KL(pi || old) on old samples
    (MDPO). It is 0 without gradient in the first update of a step. |d| is limited to 20, beyond which the gradient is
    that at the limit. Stat: `kl_old`.
    """
    d = limit_value(token_log_ratio(batch, logp), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k3":
        values = (-d).exp() + d - 1
    else:
        values = d.square() / 2 if estimator == "k2" else d.exp() * d - d.exp() + 1
    return TokenLoss(torch.where(batch.mask, values, 0.0), {"kl_old": values.detach()})


@register("loss", "dppo", paper="2602.04879", needs=("rollout_logp",), note="The top-K divergence is not implemented.")
def dppo(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    clip_low: float = 0.15,
    clip_high: float | None = None,
    cap: float = 10000.0,
) -> TokenLoss:
    """Compute -sg[min(r, cap)] A logp, masked where the divergence to the sampling policy exceeds a limit.

    p = probability of the token now, q = its probability when it was sampled (the engine's; by old_logp where it
    reported none), r = p / q. divergence `tv`: |p - q|; `kl`: that of a coin with these probabilities, q ln(q / p) + (1
    - q) ln((1 - q) / (1 - p)). A token is masked if it leads further away: A > 0, p > q and divergence > clip_high, or
    A <= 0, p < q and divergence > clip_low. clip_high defaults to clip_low; 0.15 is usual for `tv`, 0.05 for `kl`.
    Unlike a clip of the ratio, this leaves unlikely tokens room and limits likely ones. Stats [N,T]: `ratio`,
    `clip_ratio/region_mean`.
    """
    advantages, sampled = token_advantages(batch, logp), behavior_logp(batch, logp)
    current = torch.where(batch.mask, logp, 0.0)
    p, q = current.detach().exp(), sampled.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        distance = q * (sampled - current.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    high = clip_low if clip_high is None else clip_high
    away = torch.where(advantages > 0, (p > q) & (distance > high), (p < q) & (distance > clip_low))
    ratio = bounded_exp(current.detach() - sampled)
    values = torch.where(batch.mask & ~away, -ratio.clamp(max=cap) * advantages * current, 0.0)
    return TokenLoss(values, {"ratio": ratio, "clip_ratio/region_mean": away.to(logp.dtype)})
