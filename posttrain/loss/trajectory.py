"""The mean over trajectories of several rows each: chunks of one thought, stretches between summaries."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.loss.clip import clip
from posttrain.loss.correction import tis


def trajectory_mean(values: Tensor, mask: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Mean over trajectories of the sum of their tokens' values / their tokens. values, mask [N,T]; ids [N], any."""
    number = torch.unique(trajectory_ids, return_inverse=True)[1]
    count = int(number.max()) + 1 if len(number) else 0
    kept = mask.bool()
    sums = values.new_zeros(count).index_add(0, number, torch.where(kept, values, 0.0).sum(-1))
    lengths = values.new_zeros(count).index_add(0, number, kept.sum(-1).to(values))
    return (sums / lengths.clamp(min=1)).sum() / max(count, 1)


def chunked_loss(
    logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    trajectory: Tensor,
    advantages: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    clip_c: float,
    tis_cap: float,
) -> Tensor:
    """Delethink's loss (arXiv 2510.06557): the clip with a bound for A < 0, weights to the engine that are cut, and the
    mean over trajectories.

    logp, old_logp, rollout_logp, mask [N,T]: one row a chunk. trajectory [N]: which trajectory a row belongs to, from
    0; advantages: one a trajectory. Each value is min(exp(old - rollout), tis_cap) * max(-A r, -A clip(r)), at most
    -A clip_c where A < 0.
    """
    batch = RolloutBatch(
        group_ids=trajectory.long(),
        mask=mask.bool(),
        advantages=advantages[trajectory.long()],
        old_logp=old_logp,
        rollout_logp=rollout_logp,
    )
    values = clip(batch, logp, clip_low=eps_low, clip_high=eps_high, dual_clip=clip_c).values
    return trajectory_mean(tis(batch, logp, clip_max=tis_cap).weights * values, batch.mask, batch.group_ids)
