"""Where a length term applies: one idea for right rows, easy groups, a share of the batch and a warm-up.

GRPO-lambda (a share of the batch), ConciseR (groups that are all right), GDPO (a component is earned only where another
one is) and Kimi k1.5 (a warm-up) are all `open_rows` of a `Gate`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.advantage.group import group_sum, number_groups
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.options import Gate


def open_rows(batch: RolloutBatch, gate: Gate | None) -> Tensor:
    """Rows where every condition of the gate holds, bool [N]; None or {} is open everywhere.

    Unknown (NaN) correctness or component: closed. A group condition holds for all rows of its group; it looks at the
    whole batch, so it belongs before any splitting.
    """
    opened = torch.ones_like(batch.group_ids, dtype=torch.bool)
    if not gate:
        return opened
    if batch.step < gate.get("from_step", 0):
        return ~opened
    if gate.get("rows") == "correct":
        opened = opened & right(batch)
    if "on" in gate:
        opened = opened & _in_range(component(batch, gate["on"]), gate)
    if "pass_rate" in gate or "top_share" in gate:
        key, rates = group_pass_rates(batch)
        opened = opened & _groups(rates, gate)[key]
    return opened


def component(batch: RolloutBatch, name: str) -> Tensor:
    """A reward component [N] by name; `correct` and `reward` also mean correctness and the reward itself.

    Raises UserError for a name that the batch does not have.
    """
    fields = {"correct": batch.correct, "reward": batch.rewards}
    value = batch.components.get(name, fields.get(name))
    if value is None:
        raise UserError(
            f"no reward component `{name}`",
            allowed=f"the batch has: {', '.join(sorted(batch.components)) or 'none'}",
            hint="add a reward of that name; weight 0 makes it a mere annotation",
        )
    return value


def right(batch: RolloutBatch) -> Tensor:
    """Rows whose answer is right, bool [N]; unknown is not right. Raises ValueError for a batch without correctness."""
    if batch.correct is None:
        raise ValueError("the batch does not say which rows are correct")
    return batch.correct == 1


def row_lengths(batch: RolloutBatch) -> Tensor:
    """Completion tokens [N], float64; where the batch does not tell, those that the mask counts."""
    return (batch.mask.sum(-1) if batch.lengths is None else batch.lengths).double()


def count_right(correct: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group numbers [N] from 0, and of each group its right and its judged answers, both [K] float64.

    correct [N]: NaN = not judged, which is neither right nor wrong.
    """
    key = number_groups(group_ids)
    return key, group_sum((correct == 1).double(), key), group_sum((~correct.isnan()).double(), key)


def group_pass_rates(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Group numbers [N], and the share of right answers among the judged ones of each group [K]: NaN where none was, so
    that such a group is taken neither for a hard nor for an easy one.

    Raises ValueError for a batch without correctness.
    """
    if batch.correct is None:
        raise ValueError("the batch does not say which rows are correct")
    key, right, judged = count_right(batch.correct, batch.group_ids)
    return key, right / judged


def _in_range(values: Tensor, gate: Gate) -> Tensor:
    inside = ~values.isnan()
    if "min" in gate:
        inside = inside & (values >= gate["min"])
    if "above" in gate:
        inside = inside & (values > gate["above"])
    return inside


def _groups(rates: Tensor, gate: Gate) -> Tensor:
    """Groups [K] with a right answer that are good enough, or among the best; ties go to the earlier group."""
    chosen = rates > 0  # which a group that nobody could judge has not
    if "pass_rate" in gate:
        chosen = chosen & (rates >= gate["pass_rate"])
    if "top_share" in gate:
        count = max(1, math.ceil(gate["top_share"] * len(rates) - 1e-9))  # 0.07 * 100 is more than 7 in floating point
        best = torch.zeros_like(chosen)
        best[torch.argsort(rates.nan_to_num(nan=0.0), descending=True, stable=True)[:count]] = True
        chosen = chosen & best
    return chosen
