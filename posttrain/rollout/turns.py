"""Rollouts of several turns, on tokens: the model writes a turn, tools or an environment reply, and so on.

`TurnEngine` wraps another engine. Each rollout is a coroutine that samples a turn, awaits its reply and goes on. With a
`ConcurrentEngine` no rollout waits for another. An engine that generates one batch at a time is called once for all
live rollouts, when each of them waits for its next turn. The model's tokens stay as they were sampled. Replies are
segments of their own, which have no loss. What a rollout becomes depends on its place in the step, not on the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import queue
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain import source_locations
from posttrain.batch import Prompt, PromptImages, Rollout, Segment, Turn, join_images
from posttrain.errors import ToolError
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.batching import Batch
from posttrain.rollout.engine import Engine, as_rollouts, check_fits, is_concurrent
from posttrain.rollout.requests import Request, wanted_logprobs
from posttrain.rollout.template import Between, check_template
from posttrain.seeds import derive
from posttrain.tools.environments import Episode, World

if TYPE_CHECKING:
    from posttrain.models.images import ImageReader
    from posttrain.models.load import LoadedModel
    from posttrain.tools.tool_set import ToolSet


@dataclass
class Trajectory:
    """An unfinished rollout. used: its tokens after the prompt."""

    prompt: Prompt
    group: int
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ended: str = ""
    version: int | None = None  # of its first turn

    @property
    def used(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    @property
    def ids(self) -> tuple[int, ...]:
        """What the next turn continues: everything so far."""
        return self.prompt.ids + tuple(i for s in self.segments for i in s.ids)

    @property
    def images(self) -> PromptImages | None:
        """Those of the prompt and of the replies so far."""
        return join_images([(self.prompt.ids, self.prompt.images), *((s.ids, s.images) for s in self.segments)])

    def rollout(self, version: int, score: float | None) -> Rollout:
        """The finished rollout: its text is that of the model's turns, one below the other."""
        return Rollout(
            prompt=self.prompt,
            group=self.group,
            segments=tuple(self.segments),
            text="\n".join(turn.text for turn in self.turns),
            finish="stop" if self.ended in ("answer", "done") else "length",
            version=version if self.version is None else self.version,
            turns=tuple(self.turns),
            ended=self.ended,
            world_score=score,
        )


@dataclass(frozen=True)
class Step:
    """What `generate` was called with. Rollout i of prompts[p] has number p * n + i, whoever works on which."""

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    seed: int
    logprobs: bool | int
    share: Sequence[int] | None
    limits: Sequence[int] | None = None

    @functools.cached_property
    def turn(self) -> Sampling:
        """How one turn is sampled."""
        longest = min(self.sampling.turn_tokens or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        return self.sampling.model_copy(update={"max_new_tokens": longest})

    @functools.cached_property
    def numbers(self) -> list[int]:
        """Of the rollouts to be made here."""
        mine = range(len(self.prompts)) if self.share is None else self.share
        return [p * self.n + i for p in mine for i in range(self.n)]

    def budget(self, number: int) -> int:
        """Most tokens of a rollout after its prompt."""
        return self.sampling.max_new_tokens if self.limits is None else self.limits[number // self.n]

    def request(self, number: int, row: Trajectory) -> Request:
        """The next turn of a rollout: what is left of its budget, drawn by its number and the turn alone."""
        turn = len(row.turns)
        seed = derive(self.seed, "turn", turn) if turn else self.seed
        limit = min(self.turn.max_new_tokens, self.budget(number) - row.used)
        wanted = wanted_logprobs(self.logprobs, len(self.prompts), self.sampling)
        return Request(number, row.ids, 1, seed + number, limit, number < wanted * self.n, images=row.images)


Draw = Callable[[Request], Awaitable[Rollout]]


class TurnEngine:
    """An Engine for several turns around another engine, which does everything but `generate` and `close`."""

    def __init__(
        self,
        engine: Engine,
        world: World,
        tokenizer: Any,
        eos_ids: Sequence[int],
        reader: ImageReader | None = None,
    ) -> None:
        """reader: of a model that sees."""
        self.engine, self.world, self.tokenizer = engine, world, tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.between = Between(tokenizer, eos_ids, reader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        """Close the world and the engine."""
        try:
            self.world.close()
        finally:
            self.engine.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        seed: int,
        first_group: int = 0,
        logprobs: bool | int = True,
        share: Sequence[int] | None = None,
        done: Callable[[list[Rollout]], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """See `Engine.generate`; a limit is of all turns and replies. Environments are closed when this returns or
        raises."""
        step = Step(prompts, n, sampling, seed, logprobs, share, limits)
        check_fits([prompts[r // n] for r in step.numbers[::n]], sampling, self.window)
        self.engine.wake()
        calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        drawing = self._sampling_context(step, calls)
        groups: dict[int, dict[int, Rollout]] = {r // n: {} for r in step.numbers}

        def on_complete(place: int, rollout: Rollout) -> None:
            r = step.numbers[place]
            group = groups[r // n]
            group[r] = rollout
            if done is not None and len(group) == n:
                done([group[number] for number in sorted(group)])

        rollouts = [
            self._rollout(r, Trajectory(prompts[r // n], first_group + r // n), step, drawing(r)) for r in step.numbers
        ]
        return loop.run_all(rollouts, on_complete, calls)

    async def _rollout(
        self, number: int, row: Trajectory, step: Step, drawing: contextlib.AbstractContextManager[Draw]
    ) -> Rollout:
        """One rollout, from its first turn to its score. An error says of which row it is, in a note if not itself."""
        episode, sampling = self.world.episode(number), step.sampling
        try:
            await episode.begin(row.prompt.row)
            started = time.monotonic()
            with drawing as draw:
                while not row.ended:
                    value, returns = await episode.value(), await episode.returns()
                    drawn = await draw(step.request(number, row))
                    late = (
                        sampling.rollout_seconds is not None and time.monotonic() - started > sampling.rollout_seconds
                    )
                    last = len(row.turns) + 1 == sampling.max_turns
                    stop = "time" if late else "turns" if last else ""
                    await self._take(row, drawn, episode, sampling, step.budget(number), stop)
                    row.turns[-1] = dataclasses.replace(row.turns[-1], mc_value=value, returns=returns)
            return row.rollout(self.engine.version, await episode.score())
        except ToolError as error:  # an environment that breaks its contract
            raise error.at(source_locations.row(row.prompt.uid)) from error
        except Exception as error:
            error.add_note(f"in turn {len(row.turns) + 1} of a rollout of {source_locations.row(row.prompt.uid)}")
            raise
        finally:
            await episode.close()

    async def _take(
        self, row: Trajectory, drawn: Rollout, episode: Episode, sampling: Sampling, budget: int, stop: str
    ) -> None:
        """Add a turn and its reply to the rollout. budget: its most tokens. stop: why this turn is the last one, "" if
        it is not."""
        cut = add_model_turn(row, drawn, budget)
        if drawn.finish == "length" or cut:
            row.ended = "tokens"
            row.turns.append(Turn(self._text(row.segments[-1].ids)))
            return
        reply = await episode.reply(self._decode_turn(drawn.ids))
        row.ended = reply.ended or stop
        shown = None
        if not row.ended:
            segment = self.between.segment(row.segments[-1].ids[-1], reply.messages, sampling.reply_tokens)
            if row.used + len(segment.ids) >= budget:
                row.ended = "tokens"
            else:
                row.segments.append(segment)
                shown = "\n".join(str(m["content"]) for m in reply.messages)
        row.turns.append(Turn(drawn.text, reply.calls, shown, reply.reward, seconds=reply.seconds, action=reply.action))

    def _sampling_context(
        self, step: Step, calls: queue.SimpleQueue[Callable[[], object]]
    ) -> Callable[[int], contextlib.AbstractContextManager[Draw]]:
        """Number of a rollout -> around its turns, what draws them."""
        engine = self.engine
        if not is_concurrent(engine):
            batch = Batch(_all_together(engine, step), calls, step.numbers)
            return batch.member

        async def draw(request: Request) -> Rollout:
            version, prompt = engine.version, step.prompts[request.number // step.n]
            found = await engine.complete(request, step.turn)
            return as_rollouts([prompt], 1, found, self.tokenizer, first_group=0, version=version)[0]

        return lambda _: contextlib.nullcontext(draw)

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _decode_turn(self, ids: Sequence[int]) -> str:
        """A turn as the world reads it: with special tokens, which may mark a call, but without the closing one."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.eos_ids else list(ids)
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _all_together(engine: Engine, step: Step) -> Callable[[Mapping[int, Request]], dict[int, Rollout]]:
    """Draws the next turn of all live rollouts by one `generate`. In the first, each prompt is read once for n."""
    turns = itertools.count()

    def answer(asked: Mapping[int, Request]) -> dict[int, Rollout]:
        turn, n, logprobs = next(turns), step.n, step.logprobs
        if turn == 0:
            first = None if step.limits is None else [min(most, step.turn.max_new_tokens) for most in step.limits]
            how: dict[str, Any] = {"seed": step.seed, "logprobs": logprobs, "share": step.share, "limits": first}
            drawn = engine.generate(step.prompts, n, step.turn, **how)
        else:
            prompts = [prompt for prompt in step.prompts for _ in range(n)]
            limits = [1] * len(prompts)  # of those that have ended
            for r, request in asked.items():
                prompts[r] = dataclasses.replace(prompts[r], ids=request.ids, images=request.images)
                limits[r] = request.max_new_tokens
            drawn = engine.generate(
                prompts,
                1,
                step.turn,
                seed=derive(step.seed, "turn", turn),
                logprobs=logprobs if logprobs is True else int(logprobs) * n,
                share=list(asked),
                limits=limits,
            )
        return dict(zip(asked, drawn, strict=True))

    return answer


def add_model_turn(row: Trajectory, turn: Rollout, budget: int) -> bool:
    """Append the sampled turn, cut to what the token budget leaves. Returns whether it was cut."""
    segment, room = turn.segments[0], budget - row.used
    cut = len(segment.ids) > room
    row.version = turn.version if row.version is None else row.version
    logps = None if segment.logps is None else segment.logps[:room]
    versions = turn.versions[:room] if set(turn.versions) - {row.version} else None
    row.segments.append(Segment("model", segment.ids[:room], logps, versions))
    return cut


def with_turns(engine: Engine, offer: ToolSet | None, loaded: LoadedModel) -> Engine:
    """The engine; wrapped in a TurnEngine if the recipe has tools or an environment."""
    if offer is None:
        return engine
    try:
        world = offer.world()
        return TurnEngine(engine, world, loaded.tokenizer, loaded.eos_ids, loaded.images)  # type: ignore[return-value]
    except BaseException:
        engine.close()
        raise


def check_start(offer: ToolSet | None, tokenizer: Any) -> None:
    """Check, before a model loads, that the chat template suits several turns. Raises DataError."""
    if offer is not None:
        check_template(tokenizer, offer.reply_role, offer.earlier_turns)
