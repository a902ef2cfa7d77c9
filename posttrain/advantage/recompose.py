"""Which groups and rows stay, where brevity is the aim: RoRecomp's split, and how many solved prompts to admit.

Shapes: rows that stay, bool [N].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.advantage.gate import pass_rates, right, row_lengths
from posttrain.advantage.group import group_sum, number_groups, places
from posttrain.batch import RolloutBatch, Selection
from posttrain.errors import UserError
from posttrain.registry import register


@register("keep", "some_right", paper="2505.21178", needs=("groups", "correct"))
def some_right(batch: RolloutBatch) -> Tensor:
    """Groups with at least one right answer, those in which all are right included (ConciseR's second stage)."""
    key, rates = pass_rates(batch)
    return (rates > 0)[key]


@register("keep", "mixed", paper="2505.21178", needs=("groups", "correct"))
def keep_mixed_groups(batch: RolloutBatch) -> Tensor:
    """Groups with a right and a wrong answer; unlike `dynamic_sampling`, a group of one never stays."""
    return mixed_plus_solved(batch, kappa=0.0)


@register("keep", "mixed_plus_solved", paper="2509.25827", needs=("groups", "correct"))
def mixed_plus_solved(batch: RolloutBatch, *, kappa: float = 0.0) -> Tensor:
    """Groups with a right and a wrong answer, and `count_admitted` of those in which every answer is right.

    DECS: solved prompts drive the shortening. kappa is their share of what is kept; the controller `redundancy` moves
    it. The paper draws them at random; here the first ones are taken, as prompts come in random order.
    """
    key, rates = pass_rates(batch)
    assert batch.correct is not None
    known = group_sum((~batch.correct.isnan()).double(), key)
    is_mixed, solved = (rates > 0) & (rates < 1), (rates == 1) & (known > 0)
    count = count_admitted(kappa, int(is_mixed.sum()), int(solved.sum()))
    return (is_mixed | (solved & (solved.cumsum(0) <= count)))[key]


def count_admitted(kappa: float, mixed: int, solved: int) -> int:
    """floor(kappa * mixed / (1 - kappa)) solved groups beside so many mixed ones, at most all: kappa is their share."""
    if kappa <= 0:
        return 0
    return solved if kappa >= 1 else min(solved, math.floor(kappa * mixed / (1 - kappa)))


@register("select", "rorecomp", paper="2509.25958", needs=("groups", "correct"))
def rorecomp(batch: RolloutBatch, *, alpha: float = 0.5) -> Selection:
    """Of each group's right rows the ceil(alpha n) shortest, of its wrong rows the ceil(alpha n) longest (RoRecomp).

    Advantages come from the whole group, so the baseline does not move. Ties by row number; rows of unknown correctness
    go. alpha 1 is plain GRPO. Reconstructed from the abstract and a review: the paper does not state the share. Its
    compensation batches, the other rows trained later on with probability `compensation`, are not part of this: those
    rows are left out. Beside a length reward, brevity is paid twice.
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
