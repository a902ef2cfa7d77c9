"""Losses on single answers with a good or bad label: the chosen side of a PairBatch is the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import PairBatch, PairLoss
from posttrain.loss.pair import require_logp
from posttrain.registry import register


@register("pair_loss", "kto", paper="2402.01306", needs=("ref_logp", "labels"))
def kto(
    batch: PairBatch, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> PairLoss:
    """Compute w (1 - s(beta (h - z0))) for good rows, w (1 - s(beta (z0 - h))) for bad rows.

    h = log-ratio to the reference. Shapes: h and losses [P]. z0 = the mean log-ratio of mismatched completions, at
    least 0 and detached: an estimate of the KL to the reference. w = desirable_weight or undesirable_weight: keep
    (desirable_weight * good rows) / (undesirable_weight * bad rows) between 1 and 4/3. Stats: kl (z0), chosen_rewards
    (beta h, of good and bad rows), accuracy (h on the correct side of z0). Raises ValueError for a batch without
    labels.
    """
    if batch.label is None:
        raise ValueError("kto needs the label of every row")
    h = batch.chosen_logp - require_logp(batch.ref_chosen_logp)
    z0 = batch.kl_baseline
    if z0 is None:
        z0 = kl_baseline(batch.rejected_logp, batch.ref_rejected_logp)
    good = batch.label > 0.5
    sign = torch.where(good, 1.0, -1.0).to(h)
    weight = torch.where(good, desirable_weight, undesirable_weight).to(h)
    distance = sign * (h - z0)
    reported = {
        "kl": z0.expand(len(h)).to(h),
        "chosen_rewards": beta * h.detach(),
        "accuracy": (distance.detach() > 0).to(h.dtype),
    }
    return PairLoss(weight * torch.sigmoid(-beta * distance), reported)


def kl_baseline(logp: Tensor, ref_logp: Tensor | None) -> Tensor:
    """Return max(0, mean of logp - ref_logp over mismatched rows [M]), detached; 0 without rows."""
    if len(logp) == 0:
        return logp.new_zeros(())
    return (logp - require_logp(ref_logp)).detach().mean().clamp(min=0)
