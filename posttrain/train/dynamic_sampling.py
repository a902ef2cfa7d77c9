"""Collecting groups over generation batches, so that those which `keep` drops are replaced by other prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from posttrain.advantage.keep import Refill
from posttrain.batch import RolloutBatch
from posttrain.errors import RunError, count_noun

HINTS = {  # by what most of the dropped groups were
    "no right answer": "warm up with SFT, or use easier prompts or more samples a prompt",
    "only right answers": "use harder prompts",
    "right and wrong answers": "see what `keep` asks for",
    "answers that could not be scored": "see what the rewards need",
}


class DynamicSamplingBuffer:
    """Counts the groups that pass `keep` until `want` are there.

    Without `keep`, or with max_batches 1, nothing is refilled: one batch is enough and all its groups are taken (those
    that `keep` drops carry no loss).
    """

    def __init__(self, keep: Callable[[RolloutBatch], Tensor] | None, want: int, max_batches: int) -> None:
        self._keep = keep if max_batches > 1 else None
        self._refill = Refill(want, max_batches)
        self._dropped = Counter[str]()  # why groups did not pass

    @property
    def batches(self) -> int:
        return self._refill.batches

    @property
    def full(self) -> bool:
        """Enough groups, or the only batch there is."""
        return self._refill.status == "full" or (self._keep is None and self.batches > 0)

    @property
    def refills(self) -> bool:
        """Whether groups are looked at; else `take` needs only their ids."""
        return self._keep is not None

    def take(self, groups: Iterable[int]) -> set[int]:
        """The ids of all groups of a batch, where nothing is refilled."""
        taken = set(groups)
        self._refill = self._refill.add([True] * len(taken))
        return taken

    def add(self, batch: RolloutBatch) -> set[int]:
        """The ids of this batch's groups to train on; surplus groups are left out.

        Raises RunError when the last batch that is allowed leaves the step short.
        """
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        if self._keep is None:
            return self.take(groups)
        passed = set(batch.group_ids[self._keep(batch)].tolist())
        self._refill = self._refill.add([group in passed for group in groups])
        self._dropped.update(outcome(batch, group) for group in groups if group not in passed)
        if self._refill.status == "error":
            raise self._too_few()
        return {groups[index] for number, index in self._refill.selected if number == self.batches - 1}

    def _too_few(self) -> RunError:
        batches = count_noun(self.batches, "generation batch", "generation batches")
        found = self._dropped.most_common()
        passed = f"only {len(self._refill.selected)}" if self._refill.selected else "none"
        return RunError(
            f"{passed} of {count_noun(self._refill.want, 'group')} passed `keep` in {batches}",
            allowed="of those that did not pass, " + ", ".join(f"{n} had {what}" for what, n in found),
            hint=f"{HINTS[found[0][0]]}; rollout.max_gen_batches allows more batches",
        )


def outcome(batch: RolloutBatch, group: int) -> str:
    """What the answers of a group were: a key of HINTS."""
    assert batch.correct is not None
    correct = batch.correct[batch.group_ids == group]
    known = correct[~correct.isnan()]
    if not len(known):
        return "answers that could not be scored"
    if float(known.min()) == 1:
        return "only right answers"
    return "no right answer" if float(known.max()) == 0 else "right and wrong answers"
