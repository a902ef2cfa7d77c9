"""What an RL run leaves of each step: metrics, samples, rollouts for `whatif`, and what people see while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.batch import Rollout
from posttrain.run.directory import RunDirectory
from posttrain.run.progress import Progress
from posttrain.train import saved_rollouts
from posttrain.train.canary import canaries_of
from posttrain.train.checkpoint import State
from posttrain.train.pieces import Pieces
from posttrain.train.rl_metrics import sample_records, signal_note


class Record:
    """The files of a run that grow with its steps, cut back to its `done` steps, and its progress display."""

    def __init__(self, p: Pieces, directory: RunDirectory, progress: Progress, *, done: int) -> None:
        self.settings, self.folder, self.progress = p.recipe.run, directory.path, progress
        self.metrics, self.samples = directory.metrics(resume_after=done), directory.samples(resume_after=done)
        saved_rollouts.cut(self.folder, done)
        self.canaries = canaries_of(p.recipe, directory, done)
        self.trained_rewards = any(reward.weight for reward in p.recipe.rewards)

    def add(
        self, state: State, values: dict[str, Any], rollouts: Sequence[Rollout], saved: saved_rollouts.Saved
    ) -> None:
        """Write the step that `state` stands behind, with its metrics in `values`; the canaries add theirs."""
        sung, alarms = self.canaries.add(state.step, values)
        values |= sung
        self.metrics.write(state.step, values)
        saved_rollouts.write(self.folder, state.step, saved, keep=self.settings.keep_rollouts)
        self.samples.write(state.step, sample_records(rollouts, self.settings.samples_per_step))
        self.progress.update(state.step, values, spent=state.seconds)
        if self.trained_rewards and (warning := signal_note(values)):
            self.progress.note(warning)
        for alarm in alarms:
            self.progress.note(alarm)
