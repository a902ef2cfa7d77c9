"""Dynamic sampling: collects groups over several generation batches, so that groups dropped by `keep` are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from posttrain.advantage.keep import Refill
from posttrain.batch import RolloutBatch
from posttrain.errors import RunError, count_noun

HINTS = {  # by the most frequent cause of dropped groups
    "no right answer": "warm up with SFT, or use easier prompts or more samples a prompt",
    "only right answers": "use harder prompts",
    "right and wrong answers": "see what `keep` asks for",
    "answers that could not be scored": "see what the rewards need",
}
MORE_PROMPTS = "use more prompts, or a lower rollout.prompts_per_step"


class DynamicSamplingBuffer:
    """Counts groups that pass `keep` until `want` have passed.

    Without `keep`, or with max_batches 1, there is no refill: one batch suffices and all its groups are taken (groups
    that `keep` drops carry no loss).
    """

    def __init__(self, keep: Callable[[RolloutBatch], Tensor] | None, want: int, max_batches: int) -> None:
        self._keep = keep if max_batches > 1 else None
        self._refill = Refill(want, max_batches)
        self._dropped = Counter[str]()  # causes of dropped groups

    @property
    def batches(self) -> int:
        return self._refill.batches

    @property
    def full(self) -> bool:
        """Whether there are enough groups, or no further batch is allowed."""
        return self._refill.status == "full" or (self._keep is None and self.batches > 0)

    def add(self, batch: RolloutBatch) -> set[int]:
        """Return the ids of this batch's groups to train on; surplus groups are left out.

        Raises RunError if the last allowed batch leaves the step short.
        """
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        if self._keep is None:
            self._refill = self._refill.add([True] * len(groups))
            return set(groups)
        passed = set(batch.group_ids[self._keep(batch)].tolist())
        self._refill = self._refill.add([group in passed for group in groups])
        self._dropped.update(classify_group(batch, group) for group in groups if group not in passed)
        if self._refill.status == "error":
            raise self._too_few()
        return {groups[index] for number, index in self._refill.selected_groups if number == self.batches - 1}

    def _too_few(self) -> RunError:
        batches = count_noun(self.batches, "generation batch", "generation batches")
        found = self._dropped.most_common()
        passed = f"only {len(self._refill.selected_groups)}" if self._refill.selected_groups else "none"
        causes = "all passed: the sampler named too few prompts"
        if found:
            causes = "of those that did not pass, " + ", ".join(f"{n} had {what}" for what, n in found)
        return RunError(
            f"{passed} of {count_noun(self._refill.want, 'group')} passed `keep` in {batches}",
            allowed=causes,
            hint=f"{HINTS[found[0][0]] if found else MORE_PROMPTS}; rollout.max_gen_batches allows more batches",
        )


def classify_group(batch: RolloutBatch, group: int) -> str:
    """Classify the answers of a group; returns a key of HINTS."""
    assert batch.correct is not None
    correct = batch.correct[batch.group_ids == group]
    known = correct[~correct.isnan()]
    if not len(known):
        return "answers that could not be scored"
    if float(known.min()) == 1:
        return "only right answers"
    return "no right answer" if float(known.max()) == 0 else "right and wrong answers"
