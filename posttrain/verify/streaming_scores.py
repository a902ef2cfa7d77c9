"""Reward calls that begin before all samples are there: those of finished rollouts, while others are generated."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Self

from posttrain.verify.score import Sample, Scorer
from posttrain.verify.worker import Result

Results = list[list[Result]]  # [component][sample]


class Early:
    """Runs the calls of groups of samples in a thread, as they are added; several that wait are run together.

    A call of one row knows nothing of the others, so its result is the one that it would have had among all. `possible`
    says whether every reward of a scorer is of that kind.
    """

    def __init__(self, scorer: Scorer, step: int) -> None:
        self._scorer, self._step = scorer, step
        self._added: queue.SimpleQueue[tuple[int, Sequence[Sample]] | None] = queue.SimpleQueue()
        self._found: dict[int, Results] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="early rewards", daemon=True)

    @staticmethod
    def possible(scorer: Scorer) -> bool:
        """Not with calls of many rows, whose rows depend on who is there, nor with models in the trainer's process."""
        return not any(reward.batched or reward.in_trainer for reward in scorer.rewards)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the calls that run; their own limits bound this."""
        self._added.put(None)
        self._thread.join()

    def add(self, group: int, samples: Sequence[Sample]) -> None:
        """Score these soon. Each group is added once."""
        self._added.put((group, samples))

    def results(self) -> dict[int, Results]:
        """Of every group that was added. Call it behind the `with` block. Raises what a call's contract raised."""
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        more = True
        while more:
            waiting = [self._added.get()]
            while not self._added.empty():
                waiting.append(self._added.get())
            groups = [one for one in waiting if one is not None]
            more = len(groups) == len(waiting)
            if groups and self._error is None:
                try:
                    self._score(groups)
                except BaseException as error:
                    self._error = error

    def _score(self, groups: Sequence[tuple[int, Sequence[Sample]]]) -> None:
        columns = self._scorer.results([sample for _, samples in groups for sample in samples], self._step)
        start = 0
        for group, samples in groups:
            self._found[group] = [column[start : start + len(samples)] for column in columns]
            start += len(samples)
