"""Which groups stay in the batch, and the refilling of those that do not (DAPO's dynamic sampling)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.registry import register

Metric = Literal["correct", "reward"]
Status = Literal["open", "full", "short", "error"]


@register("keep", "dynamic_sampling", paper="2503.14476", needs=("groups",))
def dynamic_sampling(
    batch: RolloutBatch, *, metric: Metric = "correct", tol: float = 0.0, keep_single: bool = True
) -> Tensor:
    """Keep groups whose rows differ: max - min of the metric > tol -> rows that stay, bool [N].

    metric: `correct` (right or wrong), or `reward`. Correctness is the default because a reward with a length or format
    term differs within an all-wrong group too, and would keep it. Rows whose reward could not be scored (NaN) are left
    out; a scored row with a NaN metric raises UserError. Groups of one row stay, unless keep_single is False. Dropped
    rows leave the batch: neither their tokens nor their rows count in a denominator. Raises ValueError for a batch
    without the metric, UserError as `differs` does.
    """
    values = batch.correct if metric == "correct" else batch.rewards
    if values is None:
        raise ValueError(f"the batch has no {metric}, which dynamic_sampling filters on")
    unscored = torch.zeros_like(values, dtype=torch.bool) if batch.rewards is None else batch.rewards.isnan()
    return differs(values, batch.group_ids, tol=tol, ignore=unscored, keep_single=keep_single)


def differs(
    metric: Tensor, group_ids: Tensor, *, tol: float = 0.0, ignore: Tensor | None = None, keep_single: bool = True
) -> Tensor:
    """Rows [N] whose group has max - min of metric [N] > tol, or is a single row. Rows in `ignore` [N] have no say.

    max - min and not the std: in floating point the std of three times 0.1 is not 0. Raises UserError for a row outside
    of `ignore` whose metric is NaN.
    """
    counted = torch.ones_like(group_ids, dtype=torch.bool) if ignore is None else ~ignore
    unknown = counted & metric.isnan()
    if unknown.any():
        groups = group_ids[unknown].unique().tolist()
        raise UserError(
            f"the metric that `keep` filters on is unknown (NaN) for scored rows of groups {groups}: unknown is neither"
            " right nor wrong",
            hint="where the reward that says what is correct has no score and others do, write `metric: reward`, or"
            " `on_none: skip_row` in that reward",
        )
    key, size = torch.unique(group_ids, return_inverse=True, return_counts=True)[1:]
    start = metric.new_full(size.shape, torch.inf)
    lowest = start.scatter_reduce(0, key, torch.where(counted, metric, torch.inf), "amin")
    highest = (-start).scatter_reduce(0, key, torch.where(counted, metric, -torch.inf), "amax")
    return ((keep_single & (size == 1)) | (highest - lowest > tol))[key]


@dataclass(frozen=True)
class Refill:
    """Groups collected over generation batches until `want` have been kept. Immutable: `add` gives the next state.

    max_batches: generation batches at most, 0 = no limit. `kept` holds one tuple of flags a batch, a flag a group.
    """

    want: int
    max_batches: int = 0
    kept: tuple[tuple[bool, ...], ...] = ()
    exhausted: bool = False  # the source of prompts ended

    def add(self, flags: Sequence[bool]) -> Refill:
        """The state after one more batch, whose groups passed the filter or not."""
        return Refill(self.want, self.max_batches, (*self.kept, tuple(map(bool, flags))), self.exhausted)

    def end(self) -> Refill:
        """The state when no more batches can come."""
        return Refill(self.want, self.max_batches, self.kept, True)

    @property
    def batches(self) -> int:
        return len(self.kept)

    @property
    def selected(self) -> list[tuple[int, int]]:
        """(batch, group) of the groups to train on, in order of arrival; surplus ones are left out."""
        passed = [(b, g) for b, flags in enumerate(self.kept) for g, flag in enumerate(flags) if flag]
        return passed[: self.want]

    @property
    def status(self) -> Status:
        """open: go on; full: enough; error: max_batches were not enough; short: the source ended."""
        if len(self.selected) >= self.want:
            return "full"
        if self.max_batches and self.batches >= self.max_batches:
            return "error"
        return "short" if self.exhausted else "open"


def oversample(
    batches: Iterable[Sequence[Sequence[float]]], *, want: int, max_batches: int = 0, tol: float = 0.0
) -> Refill:
    """Dynamic sampling over given metrics [batches][groups][rows]; reads no more batches than it needs."""
    refill = Refill(want, max_batches)
    for table in batches:
        refill = refill.add([_group_differs(row, tol) for row in table])
        if refill.status != "open":
            return refill
    return refill.end()


def _group_differs(row: Sequence[float], tol: float) -> bool:
    values = torch.tensor([torch.nan if x is None else x for x in row], dtype=torch.float64)
    return bool(differs(values, torch.zeros(len(row), dtype=torch.long), tol=tol).all())
