"""What a model acts in: tools that answer its calls, or an environment that answers its turns. One a run, for all live
rollouts at once: those of a turn are answered together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain import whereabouts
from posttrain.batch import ToolCall
from posttrain.errors import ToolError
from posttrain.tools.calls import Caller
from posttrain.tools.formats import Format, parse
from posttrain.tools.simulate import mean_return


@dataclass(frozen=True)
class Reply:
    """What comes back for a turn. messages: what the model is shown, none = the rollout is over; ended: then why."""

    messages: tuple[Mapping[str, Any], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    ended: str = ""


class World(Protocol):
    def begin(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """New rollouts: number -> data row."""
        ...

    def values(self, numbers: Sequence[int]) -> dict[int, float]:
        """What the states of these rollouts are worth before their next turn; {} where nobody asks."""
        ...

    def reply(self, turns: Mapping[int, str]) -> dict[int, Reply]:
        """The answer to each rollout's turn."""
        ...

    def end(self) -> dict[int, float | None]:
        """The scores of the rollouts that `begin` began, each closed. Safe to call twice."""
        ...

    def close(self) -> None: ...


class Tools:
    """Answers the calls of a turn; a turn without a call is the model's answer and ends the rollout."""

    def __init__(self, caller: Caller, form: Format) -> None:
        self.caller, self.form = caller, form
        caller.__enter__()

    def begin(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Tools remember nothing."""
        del rows

    def values(self, numbers: Sequence[int]) -> dict[int, float]:
        """Tools have no states."""
        del numbers
        return {}

    def reply(self, turns: Mapping[int, str]) -> dict[int, Reply]:
        """All calls of all turns at once, in worker processes."""
        calls = [(number, call) for number, text in turns.items() for call in parse(text, self.form)]
        done = self.caller.run([call for _, call in calls])
        found: dict[int, list[ToolCall]] = {number: [] for number in turns}
        for (number, _), result in zip(calls, done, strict=True):
            found[number].append(result)
        return {number: _answered(results) for number, results in found.items()}

    def end(self) -> dict[int, float | None]:
        """No scores."""
        return {}

    def close(self) -> None:
        """End the workers."""
        self.caller.close()


def _answered(calls: Sequence[ToolCall]) -> Reply:
    if not calls:
        return Reply(ended="answer")
    messages = tuple({"role": "tool", "name": call.name or "unknown", "content": call.result} for call in calls)
    return Reply(messages, tuple(calls))


@dataclass(frozen=True)
class Simulations:
    """How a state's value is measured; see `simulate.mean_return`."""

    plays: int
    horizon: int
    gamma: float


class Environments:
    """One object of a user's class a rollout, always closed. They live in this process, on threads: a step over its
    time ends its rollout, but Python cannot stop it. Steps of one environment never run side by side.
    """

    def __init__(
        self, make: Callable[[], Any], workers: int, timeout_s: float, simulations: Simulations | None = None
    ) -> None:
        self.make, self.timeout_s, self.simulations = make, timeout_s, simulations
        self._asked: dict[int, int] = {}  # how often a rollout's state was simulated
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="environment")
        self.live: dict[int, Any] = {}
        self.broken: set[int] = set()
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Make and reset one for each row. What that raises ends the run: nothing has been tried yet."""
        self.end()
        for number, row in rows.items():
            self.live[number] = self.make()
            try:
                returned = self.live[number].reset(row)
            except Exception as error:
                raise _refused(row, error) from error
            if returned is not None:
                raise ToolError("an environment's reset returned something", hint="its task is the row's `prompt`")

    def values(self, numbers: Sequence[int]) -> dict[int, float]:
        """Mean returns of random plays from each state; one that raises or is late ends the run."""
        if self.simulations is None:
            return {}
        waiting = {n: self.threads.submit(self._run, n, self._simulated, n) for n in numbers}
        return {number: _result(future, self.timeout_s) for number, future in waiting.items()}

    def _simulated(self, number: int) -> float:
        assert self.simulations is not None
        self._asked[number] = self._asked.get(number, 0) + 1
        rng = random.Random(f"{number} {self._asked[number]}")
        return mean_return(self.live[number], rng, **dataclasses.asdict(self.simulations))

    def reply(self, turns: Mapping[int, str]) -> dict[int, Reply]:
        """Steps of all turns at once; what one raises, or its time, ends its rollout."""
        waiting = {n: self.threads.submit(self._run, n, self.live[n].step, text) for n, text in turns.items()}
        return {number: self._heard(number, future) for number, future in waiting.items()}

    def _run(self, number: int, function: Callable[..., Any], *given: Any) -> Any:
        with self._lock:
            self._busy.add(number)
        try:
            return function(*given)
        finally:
            with self._lock:
                self._busy.discard(number)

    def _heard(self, number: int, future: Future[Any]) -> Reply:
        try:
            return _stepped(_result(future, self.timeout_s))
        except ToolError:
            raise
        except Exception as error:
            self.broken.add(number)
            return Reply(ended="time" if isinstance(error, Late) else "error")

    def end(self) -> dict[int, float | None]:
        """Scores; a broken environment, and one whose score fails, has None. All are closed, whatever happens."""
        scores: dict[int, float | None] = {}
        try:
            for number, environment in self.live.items():
                scores[number] = None if number in self.broken else self._score(number, environment)
        finally:
            for environment in self.live.values():
                with contextlib.suppress(Exception):  # the others must be closed too
                    environment.close()
            self.live, self.broken, self._asked = {}, set(), {}
        return scores

    def _score(self, number: int, environment: Any) -> float | None:
        try:
            value = _result(self.threads.submit(self._run, number, environment.score), self.timeout_s)
        except Exception:
            return None
        return None if value is None else float(value)

    def close(self) -> None:
        """Close what is live and give up threads that hang."""
        try:
            self.end()
        finally:
            self.threads.shutdown(wait=False, cancel_futures=True)


def _refused(row: Mapping[str, Any], error: Exception) -> ToolError:
    missing = isinstance(error, KeyError) and error.args and error.args[0] not in row
    columns = ", ".join(str(name) for name in row if name != "uid")
    return ToolError(
        f"the environment cannot begin with this row: {type(error).__name__}: {error}",
        where=whereabouts.row(row.get("uid", "?")),
        allowed=f"its columns: {columns}" if missing else "",
        hint=f"its `reset` reads a column `{error.args[0]}`, which the data lack" if missing else "",
    )


def _result(future: Future[Any], seconds: float) -> Any:
    """The result within `seconds` from when it began to run, not from when it was queued."""
    while not future.running() and not future.done():
        time.sleep(0.0005)
    return future.result(timeout=seconds)


def _stepped(value: Any) -> Reply:
    """(observation, done) or (observation, done, reward) of a step."""
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not isinstance(value[1], bool):
        raise ToolError(f"an environment's step returned {value!r:.80}", allowed="(observation, done[, reward])")
    observation, done, *rest = value
    reward = float(rest[0]) if rest and rest[0] is not None else None
    if done:
        return Reply(reward=reward, ended="done")
    if not isinstance(observation, str):
        raise ToolError(f"an environment's step goes on and shows {type(observation).__name__}, not text")
    return Reply(({"role": "user", "content": observation},), reward=reward)
