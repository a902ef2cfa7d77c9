"""One step ahead (`rollout.staleness: 1`): the next step's rollouts are drawn while this step's update runs.

    step t:  take the rollouts of step t, drawn with version t-1
             sync: the engine holds version t
             begin to draw, and score, the rollouts of step t+1 with version t     } side by side, where the
             measure, advantages, update: the trainer holds version t+1            } engine runs elsewhere

Steps 1 and 2 are both drawn with the weights that the run began with. What is drawn depends on the recipe, the step
and the weights, not on timing: an engine that cannot work beside the trainer draws the same rollouts, before the
update. A draw uses the controllers' numbers and the components' memory of the step in which it begins.

With `rollout.partial` a sync does not wait for rollouts in progress: they are paused, and continue with the new
weights. Then timing matters too, and each token records which version sampled it.

A checkpoint waits for the rollouts in progress and holds them, so that a resumed run goes on with the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from posttrain.batch import Prompt, Rollout, Segment, ToolCall, Turn
from posttrain.errors import EngineError
from posttrain.run.watchdog import Watchdog
from posttrain.train import distributed
from posttrain.train.checkpoint import State
from posttrain.train.pieces import Pieces

Collect = Callable[[Pieces, State], tuple[list[Rollout], dict[str, Any]]]
FILE = "ahead.json"
PATIENCE_S = 60.0  # to wait for a draw that is given up, or saved after an error


@dataclass
class Drawn:
    """What was collected for one step."""

    rollouts: list[Rollout]
    gathered: dict[str, Any]
    position: int  # prompts drawn from the endless stream, these included
    calls: list[Any]  # `State.calls` with those that scored these
    seconds: dict[str, float] = field(default_factory=dict)  # by phase


class _Draw:
    """Runs `work` in a thread of its own, or at once if `here`."""

    def __init__(self, work: Callable[[], Drawn], *, here: bool) -> None:
        self._work = work
        self._drawn: Drawn | None = None
        self._error: BaseException | None = None
        self._thread = None if here else threading.Thread(target=self._run, name="rollouts ahead", daemon=True)
        if self._thread is None:
            self._drawn = work()
        else:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._drawn = self._work()
        except BaseException as error:
            self._error = error

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def result(self) -> Drawn:
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._drawn is not None
        return self._drawn


class Ahead:
    """The rollouts in progress, for the next step. collect: draws and scores those of one step (`collect.collect`)."""

    def __init__(self, collect: Collect, engine: Any) -> None:
        self._collect, self._engine = collect, engine
        self._draw: _Draw | None = None
        self._taken: tuple[int, Drawn] | None = None  # the step that trains, and what it trains on
        self._group = distributed.new_group()  # the drawing thread's own: its messages must not mix with the update's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up a draw in progress: closing the engine ends its requests."""
        if self._draw is not None and self._draw.under_way:
            self._engine.close()
            self._draw.wait(PATIENCE_S)

    def take(self, p: Pieces, state: State) -> tuple[list[Rollout], dict[str, Any]]:
        """The rollouts of this step, as `collect` returns them. Then syncs the engine and begins to draw the next step.

        There is nothing to begin at the last step.
        """
        if self._draw is None:  # the first step of a run, or of one resumed without rollouts drawn ahead
            p.sync(state.step)
            self._draw = self._begin(p, state)
        self._sync_midway(p, state)
        drawn = self._wait(p)
        state.position, state.calls = drawn.position, drawn.calls
        oldest = min((r.version for r in drawn.rollouts), default=state.step)
        if oldest < state.step - 1:
            raise EngineError(f"step {state.step + 1} was given rollouts of version {oldest}: more than a step old")
        p.watchdog.seconds |= {f"ahead_{name}": seconds for name, seconds in drawn.seconds.items()}
        p.sync(state.step)
        self._taken = state.step, drawn
        more = state.step + 1 < p.steps
        self._draw = self._begin(p, dataclasses.replace(state, step=state.step + 1)) if more else None
        return drawn.rollouts, drawn.gathered

    def _wait(self, p: Pieces) -> Drawn:
        assert self._draw is not None
        with p.watchdog.phase("rollout"):
            return self._draw.result()

    def _sync_midway(self, p: Pieces, state: State) -> None:
        """With `rollout.partial`: rollouts still in progress continue with the trainer's weights."""
        assert self._draw is not None
        if not p.recipe.rollout.partial or p.engine.version == state.step:
            return
        if distributed.any_rank(self._draw.under_way):
            p.sync(state.step)

    def _begin(self, p: Pieces, state: State) -> _Draw:
        """Begin to draw the rollouts of step `state.step` with the weights that the engine holds."""
        mine = dataclasses.replace(state)
        clock = Watchdog(p.watchdog.folder, None)  # only measures phases: the thread that waits is watched for hangs

        def work() -> Drawn:
            with distributed.over(self._group):
                rollouts, gathered = self._collect(dataclasses.replace(p, watchdog=clock), mine)
            return Drawn(rollouts, gathered, mine.position, mine.calls, clock.seconds)

        if p.engine.apart:
            return _Draw(work, here=False)
        with p.watchdog.phase("rollout"):
            return _Draw(work, here=True)

    # --- in checkpoints ---

    def complete(self, done: int) -> bool:
        """Whether a checkpoint of the first `done` steps can still be written, after an error before an update.

        It holds the rollouts in progress, which are waited for. If drawing the step's own rollouts failed it cannot:
        they were drawn with weights that are gone.
        """
        if self._of(done) is not None:
            return True
        if self._draw is not None:
            self._draw.wait(PATIENCE_S)
        return self._draw is None or not (self._draw.under_way or self._draw.failed)

    def finish(self, p: Pieces, state: State) -> None:
        """Wait for the rollouts in progress, so that `write` can save them. state: after the step."""
        if self._draw is not None:
            self._sync_midway(p, state)
            self._wait(p)

    def write(self, folder: Path, done: int) -> None:
        """Save what was drawn for the step after the first `done` ones, if there is one."""
        drawn = self._of(done) or (self._draw.result() if self._draw is not None else None)
        if drawn is not None:
            (folder / FILE).write_text(json.dumps(as_json(drawn)))

    def _of(self, step: int) -> Drawn | None:
        """The rollouts that step `step` (from 0) has taken, if it is the one in training."""
        return self._taken[1] if self._taken is not None and self._taken[0] == step else None

    def read(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """Take up what `write` saved, if it saved anything."""
        if (folder / FILE).is_file():
            drawn = from_json(json.loads((folder / FILE).read_text()), prompts)
            self._draw = _Draw(lambda: drawn, here=True)


def as_json(drawn: Drawn) -> dict[str, Any]:
    """What was drawn as JSON, with uids in place of prompts. Floats read back exactly."""
    rows = [{f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name != "prompt"} for r in drawn.rollouts]
    for row, r in zip(rows, drawn.rollouts, strict=True):
        row |= {
            "prompt": r.prompt.uid,
            "segments": [dataclasses.asdict(s) for s in r.segments],
            "turns": [dataclasses.asdict(t) for t in r.turns],
        }
    return {"rollouts": rows, "gathered": drawn.gathered, "position": drawn.position, "calls": drawn.calls}


def from_json(values: Mapping[str, Any], prompts: Sequence[Prompt]) -> Drawn:
    """The inverse of `as_json`; `prompts` are those that its uids name."""
    by_uid = {p.uid: p for p in prompts}
    rollouts = [
        Rollout(
            **{
                **row,
                "prompt": by_uid[row["prompt"]],
                "segments": tuple(map(_segment, row["segments"])),
                "turns": tuple(map(_turn, row["turns"])),
                "part_ends": tuple(row["part_ends"]),
                "against": tuple(row["against"]),
                "turn_rewards": tuple(row["turn_rewards"]),
                "turn_scores": {name: tuple(scores) for name, scores in row["turn_scores"].items()},
            }
        )
        for row in values["rollouts"]
    ]
    return Drawn(rollouts, dict(values["gathered"]), values["position"], values.get("calls", []))


def _turn(values: Mapping[str, Any]) -> Turn:
    return Turn(**{**values, "calls": tuple(ToolCall(**call) for call in values["calls"])})


def _segment(values: Mapping[str, Any]) -> Segment:
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Segment(**fields)
