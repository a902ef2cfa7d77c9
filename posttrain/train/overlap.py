"""One step ahead (`rollout.staleness: 1`): the next step's rollouts are drawn while this step's update runs.

    step t:  take the rollouts of step t, drawn with version t-1
             sync: the engine holds version t
             begin to draw, and score, the rollouts of step t+1 with version t     } side by side, where the
             measure, advantages, update: the trainer holds version t+1            } engine runs elsewhere

Steps 1 and 2 are both drawn with the weights that the run began with. What is drawn follows from the recipe, the step
and the weights, not from the clock: an engine that cannot work beside the trainer draws the same, before the update.
Numbers of controllers and the memory of components that reach a draw are those of the step in which it begins.

With `rollout.partial` a sync does not wait for rollouts that are still drawn when an update ends: they are paused, and
go on with the new weights. What is drawn then follows from the clock too, and each token says which version sampled
it.

A checkpoint waits for the rollouts that are under way and holds them, so that a resumed run goes on with the same ones.
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
PATIENCE_S = 60.0  # for a draw that is given up: its reward calls have limits of their own


@dataclass
class Drawn:
    """What was collected for one step."""

    rollouts: list[Rollout]
    gathered: dict[str, Any]
    position: int  # prompts drawn from the endless stream, these included
    calls: list[Any]  # `State.calls` with those that scored these
    seconds: dict[str, float] = field(default_factory=dict)  # by phase


class _Draw:
    """Drawing in a thread, or at once where `here`."""

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
    """The rollouts that are under way. `collect` draws and scores those of one step (`collect.collect`)."""

    def __init__(self, collect: Collect, engine: Any) -> None:
        self._collect, self._engine = collect, engine
        self._draw: _Draw | None = None
        self._taken: tuple[int, Drawn] | None = None  # the step that trains, and what it trains on
        self._line = distributed.new_line()  # what ranks tell each other meanwhile must not meet what the update does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is under way: the engine, closed, ends what it was asked for."""
        if self._draw is not None and self._draw.under_way:
            self._engine.close()
            self._draw.wait(PATIENCE_S)

    def take(self, p: Pieces, state: State) -> tuple[list[Rollout], dict[str, Any]]:
        """The rollouts of this step as `collect` gives them. Leaves the engine with the trainer's weights, drawing for
        the next step, if there is one."""
        if self._draw is None:  # the first step, or one that goes on where nothing was drawn ahead
            p.sync(state.step)
            self._draw = self._begin(p, state)
        self._renew(p, state)
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

    def _renew(self, p: Pieces, state: State) -> None:
        """With `rollout.partial`: what is still drawn goes on with the trainer's weights."""
        assert self._draw is not None
        if not p.recipe.rollout.partial or p.engine.version == state.step:
            return
        if distributed.any_rank(self._draw.under_way):
            p.sync(state.step)

    def _begin(self, p: Pieces, state: State) -> _Draw:
        """Draw for step `state.step` with what the engine holds. The state is a copy, or used for nothing else yet."""
        mine = dataclasses.replace(state)
        clock = Watchdog(p.watchdog.folder, None)  # it only keeps the time: the phase that waits is watched

        def work() -> Drawn:
            with distributed.over(self._line):
                rollouts, gathered = self._collect(dataclasses.replace(p, watchdog=clock), mine)
            return Drawn(rollouts, gathered, mine.position, mine.calls, clock.seconds)

        if p.engine.apart:
            return _Draw(work, here=False)
        with p.watchdog.phase("rollout"):
            return _Draw(work, here=True)

    # --- in checkpoints ---

    def complete(self, done: int) -> bool:
        """After an error before an update: whether `write` has all that a checkpoint of the `done` steps before holds,
        what is under way included, which is waited for. It has not if the step's own rollouts failed, which older
        weights drew."""
        if self._of(done) is not None:
            return True
        if self._draw is not None:
            self._draw.wait(PATIENCE_S)
        return self._draw is None or not (self._draw.under_way or self._draw.failed)

    def finish(self, p: Pieces, state: State) -> None:
        """Wait until what is under way can be saved. state: behind the step."""
        if self._draw is not None:
            self._renew(p, state)
            self._wait(p)

    def write(self, folder: Path, done: int) -> None:
        """What was drawn for the step behind the `done` ones, if those are not all."""
        drawn = self._of(done) or (self._draw.result() if self._draw is not None else None)
        if drawn is not None:
            (folder / FILE).write_text(json.dumps(as_json(drawn)))

    def _of(self, step: int) -> Drawn | None:
        """The rollouts of step 0, 1, ..., if it is the one that has taken its own."""
        return self._taken[1] if self._taken is not None and self._taken[0] == step else None

    def read(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """What `write` wrote; nothing where it wrote nothing."""
        if (folder / FILE).is_file():
            drawn = from_json(json.loads((folder / FILE).read_text()), prompts)
            self._draw = _Draw(lambda: drawn, here=True)


def as_json(drawn: Drawn) -> dict[str, Any]:
    """Prompts are named by their uid. Numbers read back to the last bit."""
    rows = [{f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name != "prompt"} for r in drawn.rollouts]
    for row, r in zip(rows, drawn.rollouts, strict=True):
        row |= {
            "prompt": r.prompt.uid,
            "segments": [dataclasses.asdict(s) for s in r.segments],
            "turns": [dataclasses.asdict(t) for t in r.turns],
        }
    return {"rollouts": rows, "gathered": drawn.gathered, "position": drawn.position, "calls": drawn.calls}


def from_json(values: Mapping[str, Any], prompts: Sequence[Prompt]) -> Drawn:
    """What `as_json` was given, with these prompts."""
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
