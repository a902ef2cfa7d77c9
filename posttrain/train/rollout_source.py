"""Where a step's rollouts come from: drawn when the step begins, or up to k steps earlier (`rollout.staleness: k`).

With staleness k the rollouts of step t (from 0) are begun with version max(0, t-k) of the weights. Step t:

    without `partial`: wait until nothing is being generated, so that no rollout has tokens of two versions
    sync: the engine holds version t; with `partial`, rollouts in progress go on with it
    begin to generate and score the rollouts of step t+k (in the first step: those of steps 0 to k)
    wait for the rollouts of step t, and train on them: the trainer holds version t+1

Where the engine can generate while the trainer changes its weights (`Engine.apart`), the third line goes on beside the
fourth. Elsewhere it ends first, and the engine sleeps during the update.

Without `partial` the rollouts depend on the recipe, the step and the weights, not on timing nor on where the engine
runs. With it timing matters too, and each token records which version sampled it. A batch of rollouts is begun with the
controllers' numbers, the components' memory and the prompt sampler's state of the step that begins it.

A checkpoint waits for the rollouts in progress and holds them, so that a resumed run goes on with the same ones.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from posttrain.run.watchdog import Watchdog
from posttrain.train import distributed, rollout_json
from posttrain.train.checkpoint import State
from posttrain.train.collect import StepRollouts, SynchronousRollouts, collect, sync_engine, take_batch
from posttrain.train.context import TrainContext

PATIENCE_S = 60.0  # to wait for rollouts that are given up, or saved after an error


class RolloutSource(Protocol):
    """Gives each step its rollouts. Each rank has one, and all ranks call the same methods in the same order."""

    def next(self, ctx: TrainContext, state: State) -> StepRollouts:
        """The scored rollouts of step `state.step`, with metrics of how they were collected.

        The engine gets the trainer's weights first; one that shares the trainer's GPU is left asleep. Moves `state`
        past the prompts and reward calls of these rollouts.
        """
        ...

    def finish(self, ctx: TrainContext, state: State) -> None:
        """Wait for rollouts in progress, so that `save` can write them. state: after the step that is done."""
        ...

    def can_save(self, done: int) -> bool:
        """Whether a run could go on exactly from a checkpoint of its first `done` steps, written by `save` now."""
        ...

    def save(self, folder: Path, done: int) -> None:
        """Write the rollouts of steps from `done` on that are there."""
        ...

    def load(self, folder: Path, ctx: TrainContext, state: State) -> None:
        """Read what `save` wrote, if it wrote anything. state: the checkpoint's."""
        ...

    def close(self) -> None:
        """Give up the rollouts in progress."""
        ...


def rollout_source(ctx: TrainContext) -> RolloutSource:
    """The source that `rollout.staleness` asks for."""
    return AsyncRollouts(ctx) if ctx.recipe.rollout.staleness else SynchronousRollouts()


class PromptStream:
    """The places of the endless stream of prompts, each handed out once, to any thread."""

    def __init__(self, position: int) -> None:
        self._position, self._lock = position, threading.Lock()

    def claim(self, count: int) -> int:
        """The first of the next `count` places."""
        with self._lock:
            start, self._position = self._position, self._position + count
        return start


class AsyncRollouts:
    """A queue of the rollouts of steps t to t+k, where t is the step that trains and k `rollout.staleness`."""

    def __init__(self, ctx: TrainContext) -> None:
        settings = ctx.recipe.rollout
        self._staleness, self._partial = settings.staleness, settings.partial
        self._engine = ctx.engine
        self._stream = PromptStream(0)
        self._tasks: dict[int, RolloutTask] = {}  # by step
        # Each task in progress talks to other ranks over a group of its own: messages of two threads must not mix.
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
        if not ctx.engine.apart:
            ctx.engine.sleep()
        task = self._tasks[step]
        with ctx.watchdog.phase("rollout"):
            batch = task.result()
        ctx.watchdog.seconds |= {f"ahead_{name}": seconds for name, seconds in batch.seconds.items()}
        try:
            ctx.ranks.run(take_batch, ctx, state, batch, self._staleness)
        except Exception as error:
            task.error = error  # not to be saved: the run would go on to fail again
            raise
        return batch

    def _begin(self, ctx: TrainContext, state: State, *, version: int) -> RolloutTask:
        """Begin to collect the rollouts of step `state.step` with the weights that the engine holds."""
        clock = Watchdog(ctx.watchdog.folder, None)  # only measures phases: the thread that waits is watched for hangs
        own, group = dataclasses.replace(ctx, watchdog=clock), self._groups[state.step % len(self._groups)]
        before = None if self._partial else self._tasks.get(state.step - 1)

        def work(on_generated: Callable[[], object]) -> StepRollouts:
            if before is not None:
                before.generated.wait()  # in order, so that prompts are drawn in the same order everywhere
            with distributed.use_group(group):
                batch = collect(own, state, self._stream.claim, on_generated)
            return dataclasses.replace(batch, seconds=clock.seconds)

        task = RolloutTask(version, work)
        # an opponent takes the place of the weights that the update would change
        if ctx.engine.apart and ctx.opponent is None:
            task.start()
        else:
            with ctx.watchdog.phase("rollout"):
                task.run()
                task.result()
        return task

    # --- checkpoints ---

    def finish(self, ctx: TrainContext, state: State) -> None:
        """See `RolloutSource.finish`. With `partial`, rollouts in progress go on with the newest weights."""
        left = [task for n, task in self._tasks.items() if n >= state.step]
        if self._partial and any(ctx.ranks.gather(any(task.running for task in left))):
            sync_engine(ctx, state.step)
        with ctx.watchdog.phase("rollout"):
            for task in left:
                task.result()

    def can_save(self, done: int) -> bool:
        """See `RolloutSource.can_save`. Rollouts that older weights have begun cannot be drawn again.

        Those of a task in progress are waited for, but not for long.
        """
        needed = [task for n, task in self._tasks.items() if n >= done and task.version < done]
        give_up = time.monotonic() + PATIENCE_S
        for task in needed:
            if not any(other.error for other in needed):
                task.wait(max(give_up - time.monotonic(), 0.0))
        return all(task.finished for task in needed)

    def save(self, folder: Path, done: int) -> None:
        """See `RolloutSource.save`: up to the first step whose rollouts are not there."""
        batches: list[StepRollouts] = []
        while (task := self._tasks.get(done + len(batches))) is not None and task.finished:
            batches.append(task.result())
        if batches:
            rollout_json.write(folder, batches)

    def load(self, folder: Path, ctx: TrainContext, state: State) -> None:
        """See `RolloutSource.load`."""
        batches = rollout_json.read(folder, ctx.prompts)
        self._stream = PromptStream(max([state.position, *(batch.position for batch in batches)]))
        self._tasks = {}
        for batch in batches:
            self._tasks[batch.step] = RolloutTask(state.step - 1, partial(_as_it_is, batch))
            self._tasks[batch.step].run()

    def close(self) -> None:
        """Give up the rollouts in progress: closing the engine ends its requests."""
        running = [task for task in self._tasks.values() if task.running]
        if running:
            self._engine.close()
        give_up = time.monotonic() + PATIENCE_S
        for task in running:
            task.wait(max(give_up - time.monotonic(), 0.0))


class RolloutTask:
    """Collects the rollouts of one step, in a thread of its own after `start`, in this one by `run`.

    version: of the weights that begin them. work: collects them; it calls its argument when the engine is done with
    them. generated: set then, and when the task has ended.
    """

    def __init__(self, version: int, work: Callable[[Callable[[], object]], StepRollouts]) -> None:
        self.version = version
        self.generated = threading.Event()
        self.error: BaseException | None = None
        self._work, self._batch = work, list[StepRollouts]()
        # Not the thread's own state: after a Ctrl-C in `Thread.join` Python 3.11 says that a running thread has ended.
        self._over = threading.Event()
        self._begun = False

    def start(self) -> None:
        self._begun = True
        threading.Thread(target=self.run, name="rollouts of a step", daemon=True).start()

    def run(self) -> None:
        """Do the work; `result` raises what it raised."""
        try:
            self._batch.append(self._work(self.generated.set))
        except BaseException as error:
            self.error = error
        finally:
            self.generated.set()
            self._over.set()

    @property
    def running(self) -> bool:
        return self._begun and not self._over.is_set()

    @property
    def finished(self) -> bool:
        """Whether the rollouts are there, without an error."""
        return bool(self._batch) and self.error is None

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end, at most so long."""
        if self.running:
            self._over.wait(seconds)

    def result(self) -> StepRollouts:
        """The rollouts, once they are there. Raises what the work raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._batch[0]


def _as_it_is(batch: StepRollouts, _: Callable[[], object]) -> StepRollouts:
    return batch
