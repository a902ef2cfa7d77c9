"""Recorder of an RL run's steps: metrics, samples, rollouts for `compare-methods`, and the progress display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import lost_rows
from posttrain.run.progress import Progress
from posttrain.train import saved_rollouts
from posttrain.train.canary import create_canaries
from posttrain.train.checkpoint import State
from posttrain.train.context import TrainContext
from posttrain.train.evaluation import evaluation_notes
from posttrain.train.own_rows import OwnRows
from posttrain.train.rl_metrics import sample_record, sampled_rows, signal_note
from posttrain.train.update_check import update_note
from posttrain.verify.failures import Calls


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    values: its metrics. scored, measured: the batch of this rank's rows before advantages were assigned, and with the
    log-probs of the update. logp [n,T]: of each of these rows when it was last trained on. tokens: sampled tokens of
    all ranks by what happened to them, each counted once; seen: their number.
    """

    rollouts: list[Rollout]
    values: dict[str, Any]
    rows_of: OwnRows
    scored: RolloutBatch
    measured: RolloutBatch
    logp: Tensor
    tokens: dict[str, float]
    seen: float

    def samples(self, count: int) -> list[dict[str, Any]]:
        """Return the step's records in samples.jsonl: `count` rollouts, each from the rank that has its text."""
        chosen = sampled_rows(len(self.rollouts), count)
        own = {
            number: sample_record(self.rollouts[number], self.measured, row)
            for row, number in enumerate(self.rows_of.mine)
            if number in chosen
        }
        records_by_row: dict[int, dict[str, Any]] = {}
        for records in self.rows_of.ranks.gather(own):
            records_by_row |= records
        return [records_by_row[n] for n in chosen]


class Record:
    """Files of a run that grow with its steps, and its progress display. Must be closed.

    The files are truncated to the steps that `state` has finished.
    """

    def __init__(self, p: TrainContext, directory: RunDirectory, progress: Progress, state: State) -> None:
        self.settings, self.folder, self.progress = p.recipe.run, directory.path, progress
        self.optim, self.model = p.recipe.optim, p.loaded.model
        done = state.step
        self.metrics, self.samples = directory.metrics(resume_after=done), directory.samples(resume_after=done)
        if done and not directory.follows:
            notes = (
                lost_rows(self.metrics, state.rows.get("metrics"), but=done),
                lost_rows(self.samples, state.rows.get("samples")),
            )
            for note in filter(None, notes):
                progress.note(note)
            self.metrics.fill(done, state.last_metrics or {})
        saved_rollouts.remove_after(self.folder, done)
        self.canaries = create_canaries(p.recipe, directory, done)
        self.failing = set[str]()  # rewards whose first failed call was reported
        self.trained_rewards = any(reward.weight for reward in p.recipe.rewards)

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()

    def sync(self, state: State) -> None:
        """Flush the written rows to disk before a checkpoint, and set their numbers in `state`."""
        self.metrics.sync()
        self.samples.sync()
        state.rows = {"metrics": self.metrics.rows, "samples": self.samples.rows}

    def add_evaluation(self, state: State, values: dict[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Write metrics and samples of the evaluation before the first step of this start."""
        if values and (state.step or self.metrics.last < 0):
            self.metrics.write(state.step, values)
            self.samples.write(state.step, samples)
            for line in evaluation_notes(state, values):
                self.progress.note(line)

    @contextmanager
    def add(self, state: State, values: dict[str, Any], result: StepResult) -> Iterator[None]:
        """Context manager around the save of the finished step.

        Everything is written and displayed before the save except the row of metrics, which is written after it, even
        if it fails: the save adds its time to `values`, and the canaries add their metrics.
        """
        canary_metrics, alarms = self.canaries.add(state.step, values)
        values |= canary_metrics
        if self.settings.keep_rollouts:
            own = saved_rollouts.build_saved(result.scored, result.measured, result.logp)
            if (saved := saved_rollouts.gather_saved(own, result.rows_of)) is not None:
                saved_rollouts.write(self.folder, state.step, saved, keep=self.settings.keep_rollouts)
        self.samples.write(state.step, result.samples(self.settings.samples_per_step))
        self.progress.update(state.step, values, spent=state.seconds_towards_limit)
        signal = signal_note(values) if self.trained_rewards else None
        if warning := update_note(values, self.optim, self.model, signal) or signal:
            self.progress.note(warning)
        if "time/eval" in values:
            for line in evaluation_notes(state, values):
                self.progress.note(line)
        for line in [*self._first_failures(state), *alarms]:
            self.progress.note(line)
        try:
            yield
        finally:
            self.metrics.write(state.step, values)

    def _first_failures(self, state: State) -> list[str]:
        """Return a note with the first failure of each reward of which no call had failed since this start."""
        newest = [calls for calls in map(Calls._make, state.calls) if calls.step == state.step - 1]
        failed = {name for calls in newest for name in (*calls.errors, *calls.timeouts) if calls.count_failures(name)}
        new = sorted(failed - self.failing)
        self.failing |= failed
        count = sum(calls.calls for calls in newest)
        return [
            f"reward {name}: {sum(calls.count_failures(name) for calls in newest)} of {count} calls failed in step"
            f" {state.step} and left rows unscored; later failures are counted in rewards/{name}/errors and /timeouts"
            f"\n{next(calls.first[name] for calls in newest if name in calls.first)}"
            for name in new
        ]
