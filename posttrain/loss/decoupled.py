"""Clipped losses with three separate policies: the sampling policy, the proximal policy, and the current policy.

Shapes: logp, values and stats [N,T].
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import (
    LOG_RATIO_LIMIT,
    behavior_logp,
    bounded_exp,
    clip_stats,
    log_ratio_to_behavior,
    token_advantages,
    token_log_ratio,
    token_ratio,
)
from posttrain.loss.correction import ENGINE_RATIO
from posttrain.registry import register

Value = TypeVar("Value", float, Tensor)


@register(
    "loss",
    "decoupled_ppo",
    paper="2110.00641",
    needs=("rollout_logp",),
    exclusive=(ENGINE_RATIO,),
    note=(
        "The proximal policy is the one whose log-probs are recomputed at the start of the step (old_logp); `ppo_ewma`"
        " uses a moving average instead. `rollout.staleness: 1` gives rollouts of an older policy."
    ),
)
def decoupled_ppo(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    cap: float = 100.0,
) -> TokenLoss:
    """Compute PPO's clip around a proximal policy p (old_logp), weighted by p / b.

    The weight is detached; b is the policy that sampled.

    With b' = max(b, sg[logp] - ln cap), which bounds pi / b' by cap: max(-A exp(logp - b'), -A exp(clamp(logp - p, ln(1
    - clip_low), ln(1 + clip_high)) + p - b')). b is rollout_logp, or p where the engine reported none; p = b gives
    exactly PPO's clip. clip_high defaults to clip_low. The weight contains the correction: do not combine with `tis`.
    Defaults are those of the paper's code. Stats are those of `clip`.
    """
    high = clip_low if clip_high is None else clip_high
    current = torch.where(batch.mask, logp, 0.0)
    behavior = torch.maximum(behavior_logp(batch, logp), current.detach() - math.log(cap))
    gap = token_log_ratio(batch, logp)
    proximal = (current - gap).detach()
    clipped = gap.clamp(math.log1p(-clip_low) if clip_low < 1 else -LOG_RATIO_LIMIT, math.log1p(high))
    advantages = token_advantages(batch, logp)
    values = torch.maximum(
        -advantages * bounded_exp(current - behavior), -advantages * bounded_exp(clipped + proximal - behavior)
    )
    stats = clip_stats(bounded_exp(gap), advantages, clip_low, high)
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)


@register(
    "loss",
    "ppo_ewma",
    paper="2110.00641",
    needs=("rollout_logp", "prox_logp"),
    exclusive=(ENGINE_RATIO,),
    note=(
        "The averaged policy's log-probs are computed once per step, before its first update; the authors recompute"
        " them for every minibatch. decay has no default in their code. As a replacement for missing old log-probs it"
        " is the approximate repair of arXiv 2605.12070. It costs one more copy of the trained weights (small under"
        " LoRA) and one more pass."
    ),
)
def ppo_ewma(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    decay: float = 0.9,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    cap: float = 100.0,
) -> TokenLoss:
    """Compute `decoupled_ppo` around a moving average of the policy's weights, updated after every optimizer step.

    With W' = decay W + 1, W = 1 at the start: average' = (decay W / W') average + (1 / W') weights. decay 0 is the
    policy before the step's first update. Raises ValueError for a batch without prox_logp.
    """
    del decay  # used by the averaged weights, see `ewma_step`
    if batch.prox_logp is None:
        raise ValueError("ppo_ewma needs the log-probs of the averaged policy (prox_logp)")
    rows = batch.replace(rollout_logp=behavior_logp(batch, logp), old_logp=batch.prox_logp)
    return decoupled_ppo(rows, logp, clip_low=clip_low, clip_high=clip_high, cap=cap)


@register(
    "loss",
    "remix",
    paper="2507.06892",
    needs=("rollout_logp",),
    exclusive=(ENGINE_RATIO,),
    note=(
        "Based on a summary of the paper. Rows are older than the policy with `replay: recent` or"
        " `rollout.staleness: 1`."
    ),
)
def remix(batch: RolloutBatch, logp: Tensor, *, clip: float = 0.2) -> TokenLoss:
    """Compute the clip for rows of an older policy b: r = exp(logp - b) within `clip` of c = exp(old_logp - b).

    max(-A r, -A clip(r, c - clip, c + clip)), b = rollout_logp (old_logp where the engine reported none), c detached. A
    fresh row has c = 1: PPO's clip. c - clip may be negative. r is the full ratio: do not combine with `tis`. Stats are
    those of `clip`, with `ratio` = exp(logp - old_logp) of this update.
    """
    ratio = bounded_exp(log_ratio_to_behavior(batch, logp))
    current = token_ratio(batch, logp)
    center = bounded_exp(log_ratio_to_behavior(batch, logp) - token_log_ratio(batch, logp)).detach()
    advantages = token_advantages(batch, logp)
    clipped = torch.minimum(torch.maximum(ratio, center - clip), center + clip)
    values = torch.maximum(-advantages * ratio, -advantages * clipped)
    is_clipped = -advantages * clipped > -advantages * ratio
    stats = {"ratio": current.detach(), "clip_ratio/region_mean": is_clipped.to(logp)}
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)


def ewma_step(average: Value, weight: float, current: Value, decay: float) -> tuple[Value, float]:
    """Return the bias-corrected average of weights after one more update (PPO-EWMA), and its total weight.

    W' = decay W + 1; average' = (decay W / W') average + current / W'. decay 0 copies the current weights; the average
    of a constant is that constant. Weights of any shape. The paper's code has no default decay.
    """
    total = decay * weight + 1
    return average * (decay * weight / total) + current / total, total
