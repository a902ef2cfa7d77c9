"""Worlds that a model acts in: tools that answer its calls, or an environment that answers its turns.

A run has one world, and each rollout has one episode in it. Episodes are independent: they only wait for free workers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from posttrain import source_locations, terminal
from posttrain.batch import ToolCall
from posttrain.errors import DataError, ToolError
from posttrain.images import Image, join_parts, split_pictures
from posttrain.recipe.sections import ImageLimits
from posttrain.recipe.tool_sections import MAX_PIXELS
from posttrain.tools import time_limits
from posttrain.tools.calls import Caller
from posttrain.tools.formats import Format, parse_calls
from posttrain.tools.simulate import action_returns, mean_return, read_action

T = TypeVar("T")
MAX_CACHED_STATES = 4096  # cache size of action returns, in states; larger than the number of prompts of a step


@dataclass(frozen=True)
class Reply:
    """Response to a turn. messages: shown to the model, () = the rollout has ended; ended: the reason. seconds: time of
    the slowest call or of the environment's step. action: the legal action that the turn was, if action returns are
    computed; None = not a legal action."""

    messages: tuple[Mapping[str, Any], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    ended: str = ""
    seconds: float | None = None
    action: str | None = None


class Episode(Protocol):
    """One rollout in a world. Methods are never called concurrently, except `close`, which comes last in any case."""

    async def begin(self, row: Mapping[str, Any]) -> None:
        """Start with this data row. An exception here ends the run."""
        ...

    async def value(self) -> float | None:
        """Return the value of the state before the next turn; None if the recipe does not use it."""
        ...

    async def returns(self) -> Mapping[str, float]:
        """Return the return of each legal action of the state; {} if the recipe does not use them."""
        ...

    async def reply(self, turn: str) -> Reply:
        """Return the response to a turn of the model."""
        ...

    async def score(self) -> float | None:
        """Return the world's score of the whole rollout; None = no score."""
        ...

    async def close(self) -> None: ...


class World(Protocol):
    """Tools or environments of a run; each rollout acts in an episode of its own. Coroutines run in one event loop."""

    def episode(self, number: int) -> Episode:
        """Create the episode of the rollout with this number in its step."""
        ...

    def close(self) -> None: ...


class Tools:
    """World of stateless tools; a rollout's episode only tracks the images that it has shown.

    limits: of the rows' images.
    """

    def __init__(self, caller: Caller, form: Format, limits: ImageLimits | None = None) -> None:
        self.caller, self.form, self.limits = caller, form, limits or ImageLimits()
        caller.__enter__()

    def episode(self, number: int) -> Episode:
        """See `World.episode`."""
        del number
        return ToolEpisode(self.caller, self.form, self.limits)

    def close(self) -> None:
        """Stop the workers."""
        self.caller.close()


class ToolEpisode:
    """Episode with tools: answers the calls of a turn. A turn without a call is the final answer and ends it."""

    def __init__(self, caller: Caller, form: Format, limits: ImageLimits) -> None:
        self.caller, self.form, self.limits = caller, form, limits
        self.schemas = {name: tool.schema for name, tool in caller.tools.items()}
        self.images: tuple[Image, ...] = ()  # shown to the model so far

    async def begin(self, row: Mapping[str, Any]) -> None:
        """Start with the row's images."""
        limits = self.limits
        self.images = tuple(Image(source, limits.min_pixels, limits.max_pixels) for source in row.get("images") or ())

    async def value(self) -> None:
        """Return None: tools have no state to value."""

    async def returns(self) -> Mapping[str, float]:
        """Return {}: tools have no state with actions."""
        return {}

    async def reply(self, turn: str) -> Reply:
        """Run the turn's calls in parallel in worker processes and return their results."""
        calls = parse_calls(turn, self.form, self.schemas)
        answers = await asyncio.gather(*(self.caller.answer(call, self.images) for call in calls))
        self.images += tuple(image for call in answers for image in call.images)
        return _reply_to_calls(answers)

    async def score(self) -> None:
        """Return None: tools do not score a rollout."""

    async def close(self) -> None:
        """Do nothing: the workers belong to the world."""


def _reply_to_calls(calls: Sequence[ToolCall]) -> Reply:
    if not calls:
        return Reply(ended="answer")
    messages = tuple(
        {"role": "tool", "name": call.name or "unknown", "content": call.result, "images": call.images}
        for call in calls
    )
    seconds = max((call.seconds for call in calls if call.seconds is not None), default=None)
    return Reply(messages, tuple(dataclasses.replace(call, images=()) for call in calls), seconds=seconds)


@dataclass(frozen=True)
class Simulations:
    """Settings of simulations from a state: its value (`simulate.mean_return`), or, with `of_actions`, the return of
    each legal action (`simulate.action_returns`)."""

    plays: int
    horizon: int
    gamma: float
    of_actions: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of both functions."""
        return {"plays": self.plays, "horizon": self.horizon, "gamma": self.gamma}


class Environments:
    """World in which each rollout has an instance of a user's class, in this process, on at most `workers` threads.

    A step that exceeds its time limit ends its rollout and frees its slot, but Python cannot stop its thread.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        workers: int,
        timeout_s: float,
        simulations: Simulations | None = None,
        max_pixels: int = MAX_PIXELS,
        shows: bool = True,
    ) -> None:
        """max_pixels: limit of an image that a step shows. shows: whether a step may show images."""
        self.make, self.timeout_s, self.simulations, self.max_pixels = make, timeout_s, simulations, max_pixels
        self.shows = shows
        self.places = asyncio.Semaphore(workers)
        self.returns: dict[str, Mapping[str, float]] = {}  # action returns by uid of the row, newest last
        self.measuring: dict[str, asyncio.Lock] = {}
        self.reported = set[str]()  # methods whose first failure was shown

    def episode(self, number: int) -> Episode:
        """See `World.episode`."""
        return EnvironmentEpisode(self, number)

    async def run(self, call: Callable[[], T], seconds: float | None) -> T:
        """Run a call on a thread once a slot is free; TimeoutError if it then takes longer than `seconds`."""
        async with self.places:
            return await time_limits.run(call, seconds)

    def report_failure(self, method: str, uid: str, error: Exception) -> None:
        """Show the first failure of a method of the environment in the terminal, with file and line."""
        if method in self.reported:
            return
        self.reported.add(method)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        what = f"took longer than {self.timeout_s:g} s" if isinstance(error, TimeoutError) else raised
        effect = {
            "step": "; such rollouts end without a score (turns/ended_error and /ended_time count them)",
            "score": "; such rollouts have no score",
        }.get(method, "")
        terminal.note(f"environment, {source_locations.describe_row(uid)}: `{method}` {what}{effect}")

    def close(self) -> None:
        """Do nothing: each rollout closes its own environment."""


class EnvironmentEpisode:
    """Episode in a user's environment: created, reset, and always closed."""

    def __init__(self, world: Environments, number: int) -> None:
        self.world, self.number = world, number
        self.environment: Any = None
        self.uid = ""
        self.asked = 0  # how often the state value was simulated
        self.broken = self.closed = False
        self.lock = threading.Lock()

    async def begin(self, row: Mapping[str, Any]) -> None:
        """Create and reset the environment, without a time limit, because it may have much to start."""
        self.uid = str(row.get("uid", ""))
        try:
            returned = await self.world.run(lambda: self._reset(row), None)
        except Exception as error:
            raise _reset_error(row, error) from error
        if returned is not None:
            raise ToolError("an environment's reset returned something", hint="its task is the row's `prompt`")

    def _reset(self, row: Mapping[str, Any]) -> Any:
        made = self.world.make()
        with self.lock:
            self.environment, closed = made, self.closed
        if closed:  # `close` was called while the environment was being created
            made.close()
            return None
        return made.reset(row)

    async def value(self) -> float | None:
        """Compute the mean return of random plays from the state. A simulation that raises or is late ends the run."""
        asked = self.world.simulations
        if asked is None or asked.of_actions:
            return None
        self.asked += 1
        rng = random.Random(f"{self.number} {self.asked}")
        return await self._play(lambda: mean_return(self.environment, rng, **asked.keywords))

    async def returns(self) -> Mapping[str, float]:
        """Compute the return of each legal action in the row's initial state; once for all rollouts of the row."""
        asked, known = self.world.simulations, self.world.returns
        if asked is None or not asked.of_actions:
            return {}
        async with self.world.measuring.setdefault(self.uid, asyncio.Lock()):
            if self.uid not in known:
                known[self.uid] = await self._play(lambda: action_returns(self.environment, self.uid, **asked.keywords))
        while len(known) > MAX_CACHED_STATES:
            oldest = next(iter(known))
            del known[oldest], self.world.measuring[oldest]
        return known.get(self.uid, {})

    async def _play(self, plays: Callable[[], T]) -> T:
        try:
            return await self.world.run(plays, self.world.timeout_s)
        except TimeoutError as late:
            raise ToolError(
                f"the simulations of a state took longer than {self.world.timeout_s:g} s",
                hint="set environment.timeout_s, or fewer environment.simulations",
            ) from late

    async def reply(self, turn: str) -> Reply:
        """Run one step of the environment. An exception or a timeout ends the rollout."""
        begun = time.monotonic()

        asked = self.world.simulations
        action: str | None = None

        def step() -> Any:
            nonlocal begun, action
            begun = time.monotonic()
            if asked is not None and asked.of_actions:
                action = read_action(self.environment, turn)
            return self.environment.step(turn)

        try:
            found = _parse_step(await self.world.run(step, self.world.timeout_s), self.world.max_pixels)
            if not self.world.shows and any(message.get("images") for message in found.messages):
                raise ToolError(
                    "an environment's step showed an image, and its annotation says that it shows none",
                    hint="annotate it as `-> tuple[Any, bool, float]`",
                )
        except ToolError:
            raise
        except Exception as error:
            self.broken = True
            self.world.report_failure("step", self.uid, error)
            found = Reply(ended="time" if isinstance(error, TimeoutError) else "error")
        return dataclasses.replace(found, seconds=time.monotonic() - begun, action=action)

    async def score(self) -> float | None:
        """Return the environment's score; None if a step failed, or if the score raises, is late or does not apply."""
        if self.broken:
            return None
        try:
            value = await self.world.run(self.environment.score, self.world.timeout_s)
        except Exception as error:
            self.world.report_failure("score", self.uid, error)
            return None
        return _check_number(value, "score")

    async def close(self) -> None:
        """Close the environment, once, even while a late step still runs. Exceptions do not end the run."""
        with self.lock:
            environment = None if self.closed else self.environment
            self.closed = True
        if environment is not None:
            try:
                await self.world.run(environment.close, self.world.timeout_s)
            except Exception as error:
                self.world.report_failure("close", self.uid, error)


def _check_number(value: Any, what: str) -> float | None:
    """Return a finite number, or None. Raises ToolError for anything else, which would corrupt the advantages."""
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise ToolError(f"an environment's {what} returned {value!r:.80}", allowed="a finite number, or None")
    return number


def _reset_error(row: Mapping[str, Any], error: Exception) -> ToolError:
    missing = isinstance(error, KeyError) and error.args and error.args[0] not in row
    columns = ", ".join(str(name) for name in row if name != "uid")
    return ToolError(
        f"the environment cannot begin with this row: {type(error).__name__}: {error}",
        where=source_locations.describe_row(row.get("uid", "?")),
        allowed=f"its columns: {columns}" if missing else "",
        hint=f"its `reset` reads a column `{error.args[0]}`, which the data lack" if missing else "",
    )


def _parse_step(value: Any, max_pixels: int) -> Reply:
    """Convert a step's result, (observation, done) or (observation, done, reward), to a Reply. An observation is a
    text, a Pillow image, or a list of both. Raises ToolError for anything else."""
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not isinstance(value[1], bool):
        raise ToolError(f"an environment's step returned {value!r:.80}", allowed="(observation, done[, reward])")
    observation, done, *reward_part = value
    reward = _check_number(reward_part[0], "step") if reward_part else None
    if done:
        return Reply(reward=reward, ended="done")
    if isinstance(observation, str):
        return Reply(({"role": "user", "content": observation},), reward=reward)
    try:
        parts = split_pictures(observation, max_pixels)
    except DataError as error:
        raise ToolError(f"an environment's step showed an image that no model can be shown: {error}") from error
    if wrong := [part for part in parts if not isinstance(part, str | Image)]:
        raise ToolError(
            f"an environment's step goes on and shows {type(wrong[0]).__name__}, not text",
            allowed="a text, a Pillow image, or a list of these",
        )
    text, images = join_parts(parts)
    return Reply(({"role": "user", "content": text, "images": images},), reward=reward)
