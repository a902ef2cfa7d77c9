"""Sources of a step's rollouts: sampled when the step begins, or up to k steps earlier (`rollout.staleness: k`).

With staleness k, sampling of the rollouts of step t (from 0) begins with version max(0, t-k) of the weights. Step t:

    without `partial`: wait until no generation is in progress, so that no rollout has tokens of two versions
    sync: the engine holds version t; with `partial`, rollouts in progress continue with it
    begin to generate and score the rollouts of step t+k (in the first step: those of steps 0 to k)
    wait for the rollouts of step t, and train on them: the trainer holds version t+1

If the engine can generate while the trainer changes its weights (`Engine.generates_during_updates`), the third line
runs in parallel with the fourth. Otherwise it finishes first, and the engine sleeps during the update.

Without `partial`, the rollouts depend on the recipe, the step and the weights, neither on timing nor on where the
engine runs. With `partial` timing matters too, and each token records the version that sampled it. A batch of rollouts
uses the controllers' numbers, the components' memory and the prompt sampler's state of the step that begins it.

A checkpoint waits for the rollouts in progress and contains them, so that a resumed run continues with the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from posttrain.batch import Prompt
from posttrain.curriculum.protocol import Group
from posttrain.run.watchdog import Watchdog
from posttrain.train import distributed
from posttrain.train.checkpoint import State
from posttrain.train.collect import StepRollouts, advance_state, collect, sync_engine
from posttrain.train.context import TrainContext
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.verify.failures import Calls

DRAIN_TIMEOUT_S = 60.0  # how long to wait for rollouts in progress when closing, or when saving after an error
QUEUED_FILE = "queued_rollouts.json"  # in a checkpoint: scored rollouts of coming steps, with uids in place of prompts


def write_queued(folder: Path, batches: Sequence[StepRollouts]) -> None:
    """Write the rollouts of several steps."""
    (folder / QUEUED_FILE).write_text(json.dumps([step_to_dict(batch) for batch in batches]))


def read_queued(folder: Path, prompts: Sequence[Prompt]) -> list[StepRollouts]:
    """Read the rollouts that `write_queued` stored; [] if there are none. prompts: those that the uids name."""
    if not (folder / QUEUED_FILE).is_file():
        return []
    by_uid = {p.uid: p for p in prompts}
    return [step_from_dict(values, by_uid) for values in json.loads((folder / QUEUED_FILE).read_text())]


def step_to_dict(batch: StepRollouts) -> dict[str, Any]:
    """Convert a step's rollouts to JSON values, without the seconds that collecting took."""
    rows = list(map(rollout_to_dict, batch.rollouts))
    fields = {name: getattr(batch, name) for name in ("step", "metrics", "calls", "position")}
    return {"rollouts": rows, **fields, "groups": list(map(dataclasses.asdict, batch.groups))}


def step_from_dict(values: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> StepRollouts:
    """Restore a step's rollouts: the inverse of `step_to_dict`. prompts: by uid."""
    lists = ("rewards", "correct", "lengths")
    groups = [{**group, **{name: tuple(group.get(name, ())) for name in lists}} for group in values.get("groups", ())]
    return StepRollouts(
        step=values["step"],
        rollouts=[rollout_from_dict(row, prompts[row["prompt"]]) for row in values["rollouts"]],
        metrics=dict(values["metrics"]),
        calls=[Calls._make(calls) for calls in values["calls"]],
        position=values["position"],
        groups=[Group(**group) for group in groups],
    )


class RolloutSource(Protocol):
    """Provider of each step's rollouts. Each rank has one, and all ranks call the same methods in the same order."""

    def next(self, ctx: TrainContext, state: State) -> StepRollouts:
        """Return the scored rollouts of step `state.step`, with metrics of how they were collected.

        The engine gets the trainer's weights first; an engine that shares the trainer's GPU is asleep on return.
        Advances `state` past the prompts and reward calls of these rollouts.
        """
        ...

    def finish(self, ctx: TrainContext, state: State) -> None:
        """Wait for rollouts in progress, so that `save` can write them. state: after the finished step."""
        ...

    def can_save(self, done: int) -> bool:
        """Return whether a run could resume exactly from a checkpoint of its first `done` steps, saved now."""
        ...

    def save(self, folder: Path, done: int) -> None:
        """Write the available rollouts of steps from `done` on."""
        ...

    def load(self, folder: Path, ctx: TrainContext, state: State) -> None:
        """Read what `save` wrote, if anything. state: the checkpoint's."""
        ...

    def close(self) -> None:
        """Abandon the rollouts in progress."""
        ...


class PromptStream:
    """Thread-safe counter over the endless stream of prompts: hands out each position once."""

    def __init__(self, position: int) -> None:
        self._position, self._lock = position, threading.Lock()

    def claim(self, count: int) -> int:
        """Claim the next `count` positions and return the first of them."""
        with self._lock:
            start, self._position = self._position, self._position + count
        return start


class AsyncRollouts:
    """Queue of the rollouts of steps t to t+k, where t is the step that trains and k is `rollout.staleness`."""

    def __init__(self, ctx: TrainContext) -> None:
        settings = ctx.recipe.rollout
        self._staleness, self._partial = settings.staleness, settings.partial
        self._engine = ctx.engine
        self._stream = PromptStream(0)
        self._tasks: dict[int, RolloutTask] = {}  # by step
        # Each task in progress uses a separate process group: messages of two threads must not mix.
        self._groups = [distributed.new_group() for _ in range(self._staleness + 1)]

    def next(self, ctx: TrainContext, state: State) -> StepRollouts:
        """See `RolloutSource.next`."""
        step = state.step
        self._tasks = {n: task for n, task in self._tasks.items() if n >= step}
        if not self._partial:
            with ctx.watchdog.phase("rollout"):
                for task in self._tasks.values():
                    task.generated.wait()
        sync_engine(ctx, step)
        for number in range(step, min(step + self._staleness + 1, ctx.steps)):
            if number not in self._tasks:
                self._tasks[number] = self._begin(ctx, dataclasses.replace(state, step=number), version=step)
        if not ctx.engine.generates_during_updates:
            ctx.engine.sleep()
        task = self._tasks[step]
        with ctx.watchdog.phase("rollout"):
            batch = task.result()
        ctx.watchdog.seconds |= {f"ahead_{name}": seconds for name, seconds in batch.seconds.items()}
        try:
            ctx.ranks.run(advance_state, ctx, state, batch, self._staleness)
        except Exception as error:
            task.error = error  # so that these rollouts are not saved: a resumed run would fail on them again
            raise
        return batch

    def _begin(self, ctx: TrainContext, state: State, *, version: int) -> RolloutTask:
        """Begin to collect the rollouts of step `state.step` with the weights that the engine holds."""
        clock = Watchdog(ctx.watchdog.folder, None)  # only times phases: hangs are detected in the waiting thread
        task_ctx, group = dataclasses.replace(ctx, watchdog=clock), self._groups[state.step % len(self._groups)]
        previous = None if self._partial else self._tasks.get(state.step - 1)

        def work(on_generated: Callable[[], object]) -> StepRollouts:
            if previous is not None:
                previous.generated.wait()  # one task at a time, so that all ranks take prompts in the same order
            with distributed.use_group(group):
                batch = collect(task_ctx, state, self._stream.claim, on_generated)
            return dataclasses.replace(batch, seconds=clock.seconds)

        task = RolloutTask(version, work)
        # An opponent's weights temporarily replace the trained ones, which the update would be changing meanwhile.
        if ctx.engine.generates_during_updates and ctx.opponent is None:
            task.start()
        else:
            with ctx.watchdog.phase("rollout"):
                task.run()
                task.result()
        return task

    # --- checkpoints ---

    def finish(self, ctx: TrainContext, state: State) -> None:
        """See `RolloutSource.finish`. With `partial`, rollouts in progress continue with the newest weights."""
        pending = [task for n, task in self._tasks.items() if n >= state.step]
        if self._partial and any(ctx.ranks.gather(any(task.is_running for task in pending))):
            sync_engine(ctx, state.step)
        with ctx.watchdog.phase("rollout"):
            for task in pending:
                task.result()

    def can_save(self, done: int) -> bool:
        """See `RolloutSource.can_save`. Rollouts begun with older weights must be complete: they cannot be sampled
        again.

        Waits up to DRAIN_TIMEOUT_S for such rollouts in progress.
        """
        needed = [task for n, task in self._tasks.items() if n >= done and task.version < done]
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        for task in needed:
            if not any(other.error for other in needed):
                task.wait(max(deadline - time.monotonic(), 0.0))
        return all(task.is_complete for task in needed)

    def save(self, folder: Path, done: int) -> None:
        """See `RolloutSource.save`: writes up to the first step whose rollouts are not complete."""
        batches: list[StepRollouts] = []
        while (task := self._tasks.get(done + len(batches))) is not None and task.is_complete:
            batches.append(task.result())
        if batches:
            write_queued(folder, batches)

    def load(self, folder: Path, ctx: TrainContext, state: State) -> None:
        """See `RolloutSource.load`."""
        batches = read_queued(folder, ctx.prompts)
        self._stream = PromptStream(max([state.position, *(batch.position for batch in batches)]))
        self._tasks = {}
        for batch in batches:
            self._tasks[batch.step] = RolloutTask(state.step - 1, partial(lambda found, _: found, batch))
            self._tasks[batch.step].run()

    def close(self) -> None:
        """Abandon the rollouts in progress: closing the engine ends its requests."""
        running = [task for task in self._tasks.values() if task.is_running]
        if running:
            self._engine.close()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        for task in running:
            task.wait(max(deadline - time.monotonic(), 0.0))


class RolloutTask:
    """Collection of the rollouts of one step: in a separate thread with `start`, in the calling thread with `run`.

    version: weights that begin them. work: collects them, and calls its argument once the engine has generated them.
    generated: set at that call, and when the task ends.
    """

    def __init__(self, version: int, work: Callable[[Callable[[], object]], StepRollouts]) -> None:
        self.version = version
        self.generated = threading.Event()
        self.error: BaseException | None = None
        self._work, self._batch = work, list[StepRollouts]()
        # Not Thread.is_alive: after a Ctrl-C in `Thread.join`, Python 3.11 reports a running thread as ended.
        self._done = threading.Event()
        self._started = False

    def start(self) -> None:
        """Run the task in a daemon thread."""
        self._started = True
        threading.Thread(target=self.run, name="rollouts of a step", daemon=True).start()

    def run(self) -> None:
        """Do the work in this thread; an exception is stored and raised by `result`."""
        try:
            self._batch.append(self._work(self.generated.set))
        except BaseException as error:
            self.error = error
        finally:
            self.generated.set()
            self._done.set()

    @property
    def is_running(self) -> bool:
        return self._started and not self._done.is_set()

    @property
    def is_complete(self) -> bool:
        """Whether the rollouts are complete, without an error."""
        return bool(self._batch) and self.error is None

    def wait(self, seconds: float | None = None) -> None:
        """Wait until a running task ends, at most `seconds` (None: no limit)."""
        if self.is_running:
            self._done.wait(seconds)

    def result(self) -> StepRollouts:
        """Wait for the rollouts and return them. Raises what the work raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._batch[0]
