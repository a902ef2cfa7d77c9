"""Importance corrections for samples of a different policy: an engine with other numerics, or an older policy version.

A correction returns detached weights [N,T] for the policy-gradient term and a mask of the tokens that keep it;
denominators and the KL term do not change. Each ratio is corrected only once.

Shapes: logp [N,T] of the current policy; weights, masks and stats [N,T].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import Correction, RolloutBatch, Selection, row_mean
from posttrain.loss.clip import (
    bounded_exp,
    log_ratio_to_behavior,
    token_advantages,
    token_log_ratio,
    token_ratio,
)
from posttrain.registry import register

ENGINE_RATIO = "correct the ratio to the engine"
Level = Literal["token", "sequence", "geometric"]


@register("correction", "tis", needs=("rollout_logp",), exclusive=(ENGINE_RATIO,))
def tis(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    level: Level = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    clip_min: float | None = None,
    clip_max: float | None = 2.0,
    veto: float | None = None,
    row_min: float | None = None,
    row_max: float | None = None,
) -> Correction:
    """Return weights pi_old / mu for tokens sampled by an engine mu whose probabilities differ from the trainer's.

    With d = old_logp - rollout_logp (0 where the engine reported none; logp stands in for a missing old_logp), level
    `token`: exp(d); `sequence`: exp(sum of d), one weight per row; `geometric`: exp(mean of d). mode `truncate`: the
    ratio clipped to [clip_min, clip_max]; `mask`: the ratio inside these bounds, 0 outside; None = no bound. veto: all
    weights of a row with a token of exp(d) < veto are 0. row_min, row_max: so are those of a row whose exp(mean of d)
    is outside these bounds; with level `token` and clip_max None this is the seq-mask-tis of OpenRLHF (0.5 to 5) and
    NeMo-RL (0.999 to 1.002). Sequence products explode with length: use `mask` or `geometric` for them. Defaults:
    token, truncate, 2 (verl and papers); TRL uses sequence, mask, 3; DART truncates at 1; ROLL vetoes at 1e-4. Stats
    [N,T]: `correction/weights`, `correction/cut` (share truncated or masked).
    """
    d, ratio = engine_ratio(batch, logp, level)
    bounded = ratio.clamp(_lower_bound(clip_min), _upper_bound(clip_max))
    outside = bounded != ratio
    weights = bounded if mode == "truncate" else torch.where(outside, 0.0, ratio)
    if veto is not None:
        vetoed = _has_below(d, batch.mask, veto)
        weights, outside = torch.where(vetoed, 0.0, weights), outside | vetoed
    if row_min is not None or row_max is not None:
        row_ratio = engine_ratio(batch, logp, "geometric")[1]
        dropped = (row_ratio < _lower_bound(row_min)) | (row_ratio > _upper_bound(row_max))
        weights, outside = torch.where(dropped, 0.0, weights), outside | dropped
    weights = torch.where(batch.mask, weights, 0.0)
    return Correction(weights, batch.mask, {"correction/weights": weights, "correction/cut": outside.to(logp.dtype)})


@register("select", "engine_ratio", needs=("old_logp", "rollout_logp"), exclusive=(ENGINE_RATIO,))
def reject(
    batch: RolloutBatch,
    *,
    level: Level = "token",
    clip_min: float | None = None,
    clip_max: float | None = 2.0,
    veto: float | None = None,
) -> Selection:
    """Select tokens whose pi_old / mu lies within [clip_min, clip_max] (verl's rejection; ROLL 0 to 2).

    Levels and veto as in correction `tis` with mode `mask`, but rejected tokens are also removed from the denominators,
    which raises the weight of the others. Raises ValueError for a batch without old_logp.
    """
    if batch.old_logp is None:
        raise ValueError("engine_ratio needs old_logp before tokens are selected")
    d, ratio = engine_ratio(batch, batch.old_logp, level)
    kept = batch.mask & (ratio >= _lower_bound(clip_min)) & (ratio <= _upper_bound(clip_max))
    return Selection(kept if veto is None else kept & ~_has_below(d, batch.mask, veto), "kept")


@register("correction", "off_policy_seq_mask", paper="2512.02556", needs=("rollout_logp",))
def off_policy_seq_mask(batch: RolloutBatch, logp: Tensor, *, threshold: float = 0.5) -> Correction:
    """Mask the policy-gradient term of rows with A < 0 that the current policy has become unlikely to produce.

    kl = mean over trained tokens of rollout_logp - logp (0 where the engine reported none): staleness and engine
    mismatch together. A row is kept if A >= 0 or kl <= threshold; with per-token advantages, its tokens with A < 0 are
    masked. threshold 0.5 is TRL's example; the paper does not state one. Stats: `seq_kl`, `off_policy_kept`.
    """
    gap = log_ratio_to_behavior(batch, logp.detach())
    if batch.rollout_logp is not None:
        gap = torch.where(batch.rollout_logp.isnan(), 0.0, gap)
    seq_kl = -row_mean(gap, batch.mask).nan_to_num(nan=0.0)
    advantages = token_advantages(batch, logp)
    kept = (advantages >= 0) | (seq_kl <= threshold)[:, None]
    stats = {"seq_kl": seq_kl, "off_policy_kept": kept.to(logp.dtype).squeeze(-1) if kept.shape[1] == 1 else kept}
    return Correction(batch.mask.to(logp.dtype), batch.mask & kept, stats)


@register(
    "correction",
    "minirl",
    paper="2512.01374",
    needs=("rollout_logp",),
    exclusive=(ENGINE_RATIO,),
    note=(
        "That the cap acts on the total ratio pi/mu is inferred from two agreeing summaries of the paper."
        " Routing replay for mixtures of experts is not implemented."
    ),
)
def minirl(
    batch: RolloutBatch, logp: Tensor, *, clip_low: float = 0.2, clip_high: float | None = 0.27, cap: float = 5.0
) -> Correction:
    """Return weights min(pi / mu, cap) for loss `reinforce`, and a token mask in place of PPO's clip.

    The weights correct engine mismatch and staleness together. A token is masked if A > 0 and r > 1 + clip_high, or A <
    0 and r < 1 - clip_low, with r = pi / pi_old: the tokens whose gradient PPO's clip removes. All weights are
    detached. Where the engine reported no log-prob, old_logp stands in. clip_high null means clip_low. The weights
    contain the whole correction: do not combine with `tis`.
    """
    total = bounded_exp(log_ratio_to_behavior(batch, logp.detach()))
    ratio = token_ratio(batch, logp.detach())
    advantages = token_advantages(batch, logp)
    high = clip_low if clip_high is None else clip_high
    cut = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    weights = torch.where(batch.mask, total.clamp(max=cap), 0.0)
    stats = {
        "correction/weights": weights,
        "correction/cut": (total > cap).to(logp.dtype),
        "clip_ratio/region_mean": cut.to(logp.dtype),
    }
    return Correction(weights, batch.mask & ~cut, stats)


def engine_ratio(batch: RolloutBatch, logp: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Return d = old_logp - rollout_logp [N,T] and the ratio at that level [N,T], both detached.

    d is 0 where a log-prob is unknown or masked.
    """
    logp = logp.detach()
    d = log_ratio_to_behavior(batch, logp) - token_log_ratio(batch, logp)
    if level == "token":
        return d, bounded_exp(d)
    row = d.sum(-1) if level == "sequence" else row_mean(d, batch.mask)
    return d, bounded_exp(row)[:, None].expand(d.shape)


def _has_below(d: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return [N,1] whether a row has a trained token of exp(d) < threshold."""
    return (mask & (d.exp() < threshold)).any(-1, keepdim=True)


def _lower_bound(bound: float | None) -> float:
    """Return the bound, or -inf for None."""
    return float("-inf") if bound is None else bound


def _upper_bound(bound: float | None) -> float:
    """Return the bound, or inf for None."""
    return float("inf") if bound is None else bound
