"""What a model acts in: tools that answer its calls, or an environment that answers its turns. One a run, for all live
rollouts at once: those of a turn are answered together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from posttrain import whereabouts
from posttrain.batch import ToolCall
from posttrain.errors import ToolError
from posttrain.tools import threads
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
        self.schemas = {name: tool.schema for name, tool in caller.tools.items()}
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
        calls = [(number, call) for number, text in turns.items() for call in parse(text, self.form, self.schemas)]
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
    """One object of a user's class a rollout, always closed. They live in this process, `workers` steps at a time on
    threads: a step over its time ends its rollout, but Python cannot stop it.
    """

    def __init__(
        self, make: Callable[[], Any], workers: int, timeout_s: float, simulations: Simulations | None = None
    ) -> None:
        self.make, self.workers, self.timeout_s, self.simulations = make, workers, timeout_s, simulations
        self._asked: dict[int, int] = {}  # how often a rollout's state was simulated
        self.live: dict[int, Any] = {}
        self.broken: set[int] = set()

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
        done = self._run({n: partial(self._simulated, n) for n in numbers})
        return {number: future.result() for number, future in done.items()}

    def _simulated(self, number: int) -> float:
        assert self.simulations is not None
        self._asked[number] = self._asked.get(number, 0) + 1
        rng = random.Random(f"{number} {self._asked[number]}")
        return mean_return(self.live[number], rng, **dataclasses.asdict(self.simulations))

    def reply(self, turns: Mapping[int, str]) -> dict[int, Reply]:
        """Steps of all turns at once; what one raises, or its time, ends its rollout."""
        done = self._run({n: partial(self.live[n].step, text) for n, text in turns.items()})
        return {number: self._heard(number, future) for number, future in done.items()}

    def _run(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Future[Any]]:
        return threads.run(calls, self.timeout_s, self.workers)

    def _heard(self, number: int, future: Future[Any]) -> Reply:
        try:
            return _stepped(future.result())
        except ToolError:
            raise
        except Exception as error:
            self.broken.add(number)
            return Reply(ended="time" if isinstance(error, Late) else "error")

    def end(self) -> dict[int, float | None]:
        """Scores; a broken environment, and one whose score fails, has None. All are closed, whatever happens."""
        sound = {number: partial(_score, one) for number, one in self.live.items() if number not in self.broken}
        scores: dict[int, float | None] = dict.fromkeys(self.live)
        try:
            scores |= {number: _scored(future) for number, future in self._run(sound).items()}
        finally:
            for environment in self.live.values():
                with contextlib.suppress(Exception):  # the others must be closed too
                    environment.close()
            self.live, self.broken, self._asked = {}, set(), {}
        return scores

    def close(self) -> None:
        """Close what is live."""
        self.end()


def _score(environment: Any) -> Any:
    return environment.score()


def _scored(future: Future[Any]) -> float | None:
    """None for a score that raised, was late, or does not apply."""
    if future.exception() is not None:
        return None
    return _number(future.result(), "score")


def _number(value: Any, what: str) -> float | None:
    """A finite number, or None. Raises ToolError for anything else: it would end in the advantages."""
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise ToolError(f"an environment's {what} returned {value!r:.80}", allowed="a finite number, or None")
    return number


def _refused(row: Mapping[str, Any], error: Exception) -> ToolError:
    missing = isinstance(error, KeyError) and error.args and error.args[0] not in row
    columns = ", ".join(str(name) for name in row if name != "uid")
    return ToolError(
        f"the environment cannot begin with this row: {type(error).__name__}: {error}",
        where=whereabouts.row(row.get("uid", "?")),
        allowed=f"its columns: {columns}" if missing else "",
        hint=f"its `reset` reads a column `{error.args[0]}`, which the data lack" if missing else "",
    )


def _stepped(value: Any) -> Reply:
    """(observation, done) or (observation, done, reward) of a step."""
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not isinstance(value[1], bool):
        raise ToolError(f"an environment's step returned {value!r:.80}", allowed="(observation, done[, reward])")
    observation, done, *rest = value
    reward = _number(rest[0], "step") if rest else None
    if done:
        return Reply(reward=reward, ended="done")
    if not isinstance(observation, str):
        raise ToolError(f"an environment's step goes on and shows {type(observation).__name__}, not text")
    return Reply(({"role": "user", "content": observation},), reward=reward)
