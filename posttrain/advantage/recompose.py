"""RoRecomp: selects short right rows and long wrong rows, to shorten completions.

Shapes: selected rows, bool [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.advantage.gate import completion_lengths, is_correct
from posttrain.advantage.group import group_sum, number_groups, rank_in_group
from posttrain.batch import RolloutBatch, Selection
from posttrain.errors import UserError
from posttrain.registry import register


@register("select", "rorecomp", paper="2509.25958", needs=("groups", "correct"))
def rorecomp(batch: RolloutBatch, *, alpha: float = 0.5) -> Selection:
    """Select the shortest of each group's right rows and the longest of its wrong rows (RoRecomp).

    ceil(alpha n) of the n right, and of the n wrong, rows. Advantages come from the whole group, so the baseline does
    not change. Ties by row number; rows of unknown correctness are dropped. alpha 1 is plain GRPO. Reconstructed from
    the abstract and a review: the paper does not state the share. With `replay: compensation` the other rows are
    trained on later; otherwise they are dropped. Together with a length reward, brevity is rewarded twice.
    """
    return Selection(batch.mask & select_priority_rows(batch, alpha=alpha)[:, None], denominator="kept")


def select_priority_rows(batch: RolloutBatch, *, alpha: float = 0.5) -> Tensor:
    """Return the rows to train on now, bool [N]. Raises UserError for an alpha outside of (0, 1]."""
    if not 0 < alpha <= 1:
        raise UserError(f"alpha {alpha}", allowed="more than 0, at most 1")
    assert batch.correct is not None
    key, lengths, is_right = number_groups(batch.group_ids), completion_lengths(batch), is_correct(batch)
    chosen = torch.zeros_like(is_right)
    for kind, order in ((is_right, -lengths), (batch.correct == 0, lengths)):
        count = (alpha * group_sum(kind.double(), key) - 1e-9).ceil().clamp(min=1)
        chosen |= kind & (rank_in_group(torch.where(kind, order, -torch.inf), key) < count[key])
    return chosen
