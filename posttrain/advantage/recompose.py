"""Which rows stay, where brevity is the aim: RoRecomp's split.

Shapes: rows that stay, bool [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.advantage.gate import right, row_lengths
from posttrain.advantage.group import group_sum, number_groups, places
from posttrain.batch import RolloutBatch, Selection
from posttrain.errors import UserError
from posttrain.registry import register


@register("select", "rorecomp", paper="2509.25958", needs=("groups", "correct"))
def rorecomp(batch: RolloutBatch, *, alpha: float = 0.5) -> Selection:
    """Of each group's right rows the ceil(alpha n) shortest, of its wrong rows the ceil(alpha n) longest (RoRecomp).

    Advantages come from the whole group, so the baseline does not move. Ties by row number; rows of unknown correctness
    go. alpha 1 is plain GRPO. Reconstructed from the abstract and a review: the paper does not state the share. The
    other rows are trained on later with `replay: compensation`; without it they are left out. Beside a length reward,
    brevity is paid twice.
    """
    return Selection(batch.mask & priority(batch, alpha=alpha)[:, None], denominator="kept")


def priority(batch: RolloutBatch, *, alpha: float = 0.5) -> Tensor:
    """The rows to train on now, bool [N]. Raises UserError for an alpha outside of (0, 1]."""
    if not 0 < alpha <= 1:
        raise UserError(f"alpha {alpha}", allowed="more than 0, at most 1")
    assert batch.correct is not None
    key, lengths, is_right = number_groups(batch.group_ids), row_lengths(batch), right(batch)
    chosen = torch.zeros_like(is_right)
    for kind, order in ((is_right, -lengths), (batch.correct == 0, lengths)):
        count = (alpha * group_sum(kind.double(), key) - 1e-9).ceil().clamp(min=1)
        chosen |= kind & (places(torch.where(kind, order, -torch.inf), key) < count[key])
    return chosen
