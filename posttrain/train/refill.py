"""Collecting groups over generation batches, so that those which `keep` drops are replaced by other prompts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posttrain.advantage.keep import Refill
from posttrain.batch import RolloutBatch
from posttrain.errors import RunError, counted


class Accumulator:
    """Counts the groups that pass `keep` until `want` are there.

    Without `keep`, or with max_batches 1, nothing is refilled: one batch is enough and all its groups are taken (those
    that `keep` drops carry no loss).
    """

    def __init__(self, keep: Callable[[RolloutBatch], Tensor] | None, want: int, max_batches: int) -> None:
        self._keep = keep if max_batches > 1 else None
        self._refill = Refill(want, max_batches)

    @property
    def batches(self) -> int:
        return self._refill.batches

    @property
    def full(self) -> bool:
        """Enough groups, or the only batch there is."""
        return self._refill.status == "full" or (self._keep is None and self.batches > 0)

    def add(self, batch: RolloutBatch) -> set[int]:
        """The ids of this batch's groups to train on; surplus groups are left out.

        Raises RunError when the last batch that is allowed leaves the step short.
        """
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        if self._keep is None:
            self._refill = self._refill.add([True] * len(groups))
            return set(groups)
        passed = set(batch.group_ids[self._keep(batch)].tolist())
        self._refill = self._refill.add([group in passed for group in groups])
        if self._refill.status == "error":
            batches = counted(self.batches, "generation batch", "generation batches")
            raise RunError(
                f"only {len(self._refill.selected)} of {counted(self._refill.want, 'group')} passed `keep` in"
                f" {batches}: the prompts are too hard or too easy for this model",
                hint="see signal/too_hard and signal/too_easy; change the data, or raise rollout.max_gen_batches",
            )
        return {groups[index] for number, index in self._refill.selected if number == self.batches - 1}
