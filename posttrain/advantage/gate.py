"""Gates: row masks that restrict a term to right rows, easy groups, a share of the batch or later steps.

GRPO-lambda (a share of the batch), ConciseR (groups that are all right), GDPO (a component counts only where another
one does) and Kimi k1.5 (a warm-up) are all a `Gate` that `evaluate_gate` turns into rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.advantage.group import group_sum, number_groups
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.options import Gate


def evaluate_gate(batch: RolloutBatch, gate: Gate | None) -> Tensor:
    """Return the rows where every condition of the gate holds, bool [N]; None or {} selects all rows.

    A row with unknown (NaN) correctness or component is not selected. A group condition holds for all rows of its
    group; it reads the whole batch, so call this before splitting the batch.
    """
    opened = torch.ones_like(batch.group_ids, dtype=torch.bool)
    if not gate:
        return opened
    if batch.step < gate.get("from_step", 0):
        return ~opened
    if gate.get("rows") == "correct":
        opened = opened & is_correct(batch)
    if "on" in gate:
        opened = opened & _in_range(get_component(batch, gate["on"]), gate)
    if "pass_rate" in gate or "top_share" in gate:
        key, rates = group_pass_rates(batch)
        opened = opened & _select_groups(rates, gate)[key]
    return opened


def get_component(batch: RolloutBatch, name: str) -> Tensor:
    """Return a reward component [N] by name; `correct` and `reward` also name correctness and the reward itself.

    Raises UserError for a name that the batch does not have.
    """
    fields = {"correct": batch.correct, "reward": batch.rewards}
    value = batch.components.get(name, fields.get(name))
    if value is None:
        raise UserError(
            f"no reward component `{name}`",
            allowed=f"the batch has: {', '.join(sorted(batch.components)) or 'none'}",
            hint="add a reward of that name; with weight 0 it does not change the reward",
        )
    return value


def is_correct(batch: RolloutBatch) -> Tensor:
    """Return the rows whose answer is right, bool [N]; unknown counts as not right.

    Raises ValueError for a batch without correctness.
    """
    if batch.correct is None:
        raise ValueError("the batch has no correctness")
    return batch.correct == 1


def completion_lengths(batch: RolloutBatch) -> Tensor:
    """Return completion tokens [N], float64: `batch.lengths` if present, else the trained tokens of the mask."""
    return (batch.mask.sum(-1) if batch.lengths is None else batch.lengths).double()


def count_correct(correct: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return group numbers [N] from 0, and the right and the judged answers of each group, both [K] float64.

    correct [N]: NaN = not judged, which is neither right nor wrong.
    """
    key = number_groups(group_ids)
    return key, group_sum((correct == 1).double(), key), group_sum((~correct.isnan()).double(), key)


def group_pass_rates(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Return group numbers [N], and the share of right answers among the judged ones of each group [K].

    The share is NaN for a group without a judged answer, so that it counts neither as hard nor as easy. Raises
    ValueError for a batch without correctness.
    """
    if batch.correct is None:
        raise ValueError("the batch has no correctness")
    key, correct, judged = count_correct(batch.correct, batch.group_ids)
    return key, correct / judged


def _in_range(values: Tensor, gate: Gate) -> Tensor:
    """Return the rows whose value meets the gate's `min` and `above`; NaN does not."""
    inside = ~values.isnan()
    if "min" in gate:
        inside = inside & (values >= gate["min"])
    if "above" in gate:
        inside = inside & (values > gate["above"])
    return inside


def _select_groups(rates: Tensor, gate: Gate) -> Tensor:
    """Return the groups [K] with a right answer that meet `pass_rate` and `top_share`; ties go to the earlier group."""
    chosen = rates > 0  # False for NaN: a group without a judged answer
    if "pass_rate" in gate:
        chosen = chosen & (rates >= gate["pass_rate"])
    if "top_share" in gate:
        count = max(1, math.ceil(gate["top_share"] * len(rates) - 1e-9))  # 0.07 * 100 is more than 7 in floating point
        best = torch.zeros_like(chosen)
        best[torch.argsort(rates.nan_to_num(nan=0.0), descending=True, stable=True)[:count]] = True
        chosen = chosen & best
    return chosen
