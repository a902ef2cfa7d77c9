"""Rollouts of several requests: the recipe's shape (`rollout.shape`), run on an engine.

Each rollout is a coroutine of the shape (`posttrain/shapes/`). An engine that takes requests as they come serves each
by itself; another is called for all rollouts that wait, once for each prompt that one of them asks for at a time. What
a rollout becomes follows from (seed, its place in the step, how often it has asked), not from other rollouts or ranks.
Rows that a shape wants graded are scored in the thread that waits for the rollouts.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from posttrain import registry, source_locations
from posttrain.batch import Prompt, PromptImages, Rollout, Segment
from posttrain.errors import PosttrainError, RecipeError
from posttrain.recipe.rollout_sections import RolloutShape, Sampling
from posttrain.rollout import loop
from posttrain.rollout.batching import Batch
from posttrain.rollout.engine import Completion, Engine, check_fits, is_concurrent
from posttrain.rollout.requests import Request, wanted_logprobs
from posttrain.rollout.template import between_turns
from posttrain.seeds import derive
from posttrain.shapes.protocol import Asked, Draw, Grade, Row, Sampled

if TYPE_CHECKING:
    from posttrain.models.images import ImageReader

MOST_ROLLOUTS = 65_536  # of a prompt, as group_size has it
GradeRows = Callable[[Sequence[Row]], Awaitable[list[Grade]]]
GradeRollouts = Callable[[Sequence[Rollout]], list[Grade]]
# Prompts, the most new tokens of each, greedily, the adapter.
Wanted = tuple[Sequence[tuple[int, ...]], Sequence[int], bool, str | None]


@dataclass(frozen=True)
class Shape:
    """The recipe's shape with its keys bound. room: tokens by which a row may exceed prompt + max_new_tokens. key: its
    place in the recipe; a workflow may make no rows, where it calls no trained role. learn: of one with a memory,
    what it makes of a step (`Learner.learn`)."""

    name: str
    function: Callable[..., Any]
    params: Mapping[str, Any]
    tokenizer: Any
    own_group: bool  # the rows of a rollout are a group of their own
    room: int
    reads_logps: bool = False  # of every rollout, so that all need the engine's log-probs
    grades: bool = False  # it has rows graded on the way
    key: Literal["rollout.shape", "rollout.workflow"] = "rollout.shape"
    learn: Callable[..., Any] | None = None
    world: Callable[[], Any] | None = None  # makes the environment that it acts in
    reader: ImageReader | None = None  # of a model that sees

    @classmethod
    def from_recipe(
        cls,
        section: RolloutShape,
        component: registry.Component,
        tokenizer: Any,
        reader: ImageReader | None = None,
    ) -> Shape:
        """Bind the keys. Raises RecipeError for a function that is no coroutine function, and for a class that has none
        in `run`, or no `learn`."""
        function: Any = component.function
        learn, params = None, section.params
        if inspect.isclass(function):
            learner = function(**params)
            function, learn, params = getattr(learner, "run", None), getattr(learner, "learn", None), {}
            if learn is None:
                raise RecipeError(
                    f"rollout.shape `{section.use}` is a class without `learn`",
                    allowed="def learn(self, memory, ended, step) -> Remembered",
                    hint="a shape that learns nothing is a coroutine function",
                )
        if not inspect.iscoroutinefunction(function):
            raise RecipeError(
                f"rollout.shape `{section.use}` is no coroutine function", allowed="async def shape(asked, *, KEYS)"
            )
        defaults = {key: default for key, (_, default) in component.params.items()}
        return cls(
            name=component.name,
            function=function,
            params=params,
            tokenizer=tokenizer,
            own_group=section.may("own_group"),
            room=_count_added_tokens({**defaults, **section.params}, tokenizer),
            reads_logps=section.may("rollout_logp") or ":" in section.use,
            grades=section.may("grades"),
            learn=learn,
            reader=reader,
        )

    def images(self, prompt: Prompt, ids: tuple[int, ...]) -> PromptImages | None:
        """The images that tokens show: those of the data's prompt, or none. Raises DataError for tokens that show only
        some of them."""
        known = prompt.images
        if known is None or ids[: known.length] == prompt.ids[: known.length]:
            return known
        assert self.reader is not None
        short = self.reader.shorten(ids, known.shown)
        return None if short is None else PromptImages(known.shown, short, len(ids))

    def reply(self, last: int, text: str, most: int) -> tuple[int, ...]:
        """Tokens of a message that is shown after the model's token `last`, with at most so many of its text."""
        return between_turns(self.tokenizer).tokens(last, [{"role": "user", "content": text}], most)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, without those that begin a sequence."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """The text of tokens."""
        skip = not special
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def rehearse_shape(shape: Shape, prompt: Prompt, sampling: Sampling) -> list[Row]:
    """The rows of one rollout whose completions fill their limits, without a model. Raises what the shape raises."""

    async def draw(_: Sequence[tuple[int, ...]], limits: Sequence[int], **how: Any) -> list[Sampled]:
        del how
        ids = prompt.ids[:1]
        return [Sampled(Segment("model", ids * limit, (-1.0,) * limit), "length") for limit in limits]

    async def grade(rows: Sequence[Row]) -> list[Grade]:
        return [Grade(0.0, False)] * len(rows)

    asked = _describe_rollout(shape, prompt, sampling, 0, draw, grade)
    return loop.run_all([_call(shape, asked, prompt)])[0]


def _describe_rollout(
    shape: Shape, prompt: Prompt, sampling: Sampling, seed: int, draw: Draw, grade: GradeRows
) -> Asked:
    """What the shape is given for one rollout."""
    return Asked(
        prompt=prompt.ids,
        row=prompt.row,
        max_new_tokens=sampling.max_new_tokens,
        window=len(prompt.ids) + sampling.max_new_tokens + shape.room,
        seed=seed,
        draw=draw,
        grade=grade,
        encode=shape.encode,
        decode=shape.decode,
        text=lambda ids: shape.decode(ids, special=False),
        world=shape.world,
        reply=shape.reply,
    )


def _count_added_tokens(params: Mapping[str, Any], tokenizer: Any) -> int:
    """Tokens of the texts among a shape's keys, and its `answer_tokens`: what a row may have besides prompt and
    max_new_tokens."""
    texts = [value for value in params.values() if isinstance(value, str)]
    added = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    return added + int(params.get("answer_tokens") or 0)


def generate_shaped(
    engine: Engine,
    shape: Shape,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    *,
    seed: int,
    first_group: int,
    logprobs: bool | int,
    share: Sequence[int],
    apart: int,
    grade: GradeRollouts,
    metrics: dict[str, Any],
    begun: Sequence[tuple[Segment, ...]] = (),
    memory: Any = None,
) -> list[Rollout]:
    """n rollouts of each of prompts[share], each as its rows in order, which have its number as `trajectory`.

    apart: added to the group's number for each further group of a prompt, where the rows of a rollout are a group.
    begun: what earlier steps have sampled of each prompt's rollouts, () = nothing. memory: of a workflow. grade: called
    in this thread with rows that a shape wants graded. Adds the number of all sampled tokens, those of no row too, to
    `metrics`. Raises RecipeError for an error of a user's function, with its line."""
    check_fits([prompts[p] for p in share], sampling, engine.window - shape.room)
    engine.wake()
    calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    numbers = [p * n + i for p in share for i in range(n)]
    wanted = wanted_logprobs(logprobs, len(prompts), sampling) * n
    seen = [partial(shape.images, prompts[number // n]) for number in range(len(prompts) * n)]
    answer = _answer_together(engine, sampling, seed, wanted, seen, grade)
    batch = Batch(answer, calls, None if is_concurrent(engine) else numbers)
    drawn: list[int] = []

    async def make(number: int) -> list[Rollout]:
        prompt, times = prompts[number // n], itertools.count()

        async def draw_alone(
            asked: Sequence[tuple[int, ...]], limits: Sequence[int], greedy: bool, adapter: str | None
        ) -> list[Sampled]:
            assert is_concurrent(engine)
            time, version = next(times), engine.version
            requests = [
                Request(
                    number,
                    ids,
                    1,
                    derive(seed, "shape", time, k) + number,
                    limit,
                    number < wanted,
                    images=shape.images(prompt, ids),
                    adapter=adapter,
                )
                for k, (ids, limit) in enumerate(zip(asked, limits, strict=True))
            ]
            how = _as_greedy(sampling) if greedy else sampling
            found = await asyncio.gather(*(engine.complete(request, how) for request in requests))
            return [_as_sampled(completion, version) for (completion,) in found]

        place, own = divmod(number, n)
        group = first_group + place + (apart * own if shape.own_group else 0)
        trajectory = (first_group + place) * MOST_ROLLOUTS + own

        def as_rollouts(rows: Sequence[Row]) -> list[Rollout]:
            made = partial(_as_rollout, shape, prompt, group, trajectory, engine.version)
            return [made(part, row) for part, row in enumerate(rows)]

        with batch.member(number) as ask:

            async def draw(
                asked: Sequence[tuple[int, ...]],
                limits: Sequence[int],
                *,
                greedy: bool = False,
                adapter: str | None = None,
            ) -> list[Sampled]:
                wish = (asked, limits, greedy, adapter)
                found = await (draw_alone(*wish) if is_concurrent(engine) else ask(wish))
                drawn.append(sum(len(one.ids) for one in found))
                return found

            async def grade_rows(rows: Sequence[Row]) -> list[Grade]:
                return await ask(as_rollouts(rows)) if rows else []

            asked = _describe_rollout(shape, prompt, sampling, derive(seed, "shape", number), draw, grade_rows)
            asked = replace(asked, begun=begun[place] if begun else (), memory=memory)
            rows = await _call(shape, asked, prompt)
        return as_rollouts(rows)

    made = loop.run_all([make(number) for number in numbers], None, calls)
    metrics["rollout/drawn_tokens"] = metrics.get("rollout/drawn_tokens", 0) + sum(drawn)
    found = [rollout for rows in made for rollout in rows]
    _group_calls(found, apart)
    return found


def _group_calls(rollouts: Sequence[Rollout], apart: int) -> None:
    """Give the calls of a workflow their groups: of each prompt, numbers that are `apart` from each other, in the order
    in which its roles were called."""
    known: dict[int, dict[tuple[Any, ...], int]] = {}
    for rollout in rollouts:
        if (call := rollout.call) is not None:
            of_parent = (rollout.trajectory, call.calls[call.number].parent) if call.compared == "parent" else ()
            groups = known.setdefault(rollout.group, {})
            rollout.group += apart * groups.setdefault((call.role, *of_parent), len(groups))


async def _call(shape: Shape, asked: Asked, prompt: Prompt) -> list[Row]:
    """The rows of a rollout. An error of a user's function says of which row of the data it is."""
    about = f"{shape.key} `{shape.name}` of {source_locations.row(prompt.uid)}"
    try:
        rows = list(await shape.function(asked, **shape.params))
    except PosttrainError:
        raise
    except Exception as error:
        if not (line := registry.script_line(error)):
            raise
        raise RecipeError(f"{about}: {type(error).__name__}: {error}", where=line) from error
    strange = next((row for row in rows if not isinstance(row, Row)), None)
    scored = any(row.scored or row.goes_on for row in rows) if strange is None else False
    if strange is not None or (shape.key == "rollout.shape" and not scored):
        what = "no row that is scored" if strange is None else f"{strange!r:.60}"
        raise RecipeError(f"{about} returned {what}", allowed="a list of posttrain.shapes.protocol.Row")
    return rows


def _answer_together(
    engine: Engine,
    sampling: Sampling,
    seed: int,
    wanted: int,
    seen: Sequence[Callable[[tuple[int, ...]], PromptImages | None]],
    grade: GradeRollouts,
) -> Callable[[Mapping[int, Wanted | list[Rollout]]], dict[int, list[Any]]]:
    """Answers all rollouts that wait: one call of `grade` for all rows to grade, one call of the engine for the k-th
    prompt of each, so that a prompt's place in the call is its rollout's number. wanted: of how many rollouts, from the
    first on, log-probs are asked for; seen: of all rollouts of the step, so that what is drawn does not depend on
    ranks, which images a prompt's tokens show.
    """
    times = itertools.count()

    def answer(asked: Mapping[int, Wanted | list[Rollout]]) -> dict[int, list[Any]]:
        time = next(times)
        found: dict[int, list[Any]] = {number: [] for number in asked}
        rows = {number: made for number, made in asked.items() if isinstance(made, list)}
        grades = iter(grade([rollout for made in rows.values() for rollout in made]) if rows else ())
        for number, made in rows.items():
            found[number] = list(itertools.islice(grades, len(made)))
        draws = {number: wish for number, wish in asked.items() if not isinstance(wish, list)}
        longest = max((len(ids) for ids, *_ in draws.values()), default=0)
        for k, greedy in itertools.product(range(longest), (False, True)):
            mine = {
                number: (ids[k], most[k], adapter)
                for number, (ids, most, how, adapter) in draws.items()
                if len(ids) > k and how is greedy
            }
            if not mine:
                continue
            empty = Prompt("", {}, "", (0,))
            prompts, limits = [empty] * len(seen), [1] * len(seen)
            for number, (ids, limit, adapter) in mine.items():
                prompts[number] = replace(empty, ids=ids, images=seen[number](ids), adapter=adapter)
                limits[number] = limit
            drawn = engine.generate(
                prompts,
                1,
                _as_greedy(sampling) if greedy else sampling,
                seed=derive(seed, "shape", time, k),
                logprobs=wanted,
                share=list(mine),
                limits=limits,
            )
            for number, rollout in zip(mine, drawn, strict=True):
                segment = replace(rollout.segments[0], versions=rollout.versions)
                found[number].append(Sampled(segment, rollout.finish, rollout.version))
        return found

    return answer


def _as_greedy(sampling: Sampling) -> Sampling:
    """The same with the most probable tokens; what else cuts the distribution says nothing then."""
    return sampling.model_copy(update={"temperature": 0.0})


def _as_sampled(completion: Completion, version: int) -> Sampled:
    first = completion.versions[0] if completion.versions else version
    versions = completion.versions or (version,) * len(completion.ids)
    segment = Segment("model", completion.ids, completion.logps, versions)
    return Sampled(segment, "stop" if completion.finish == "stop" else "length", first)


def _as_rollout(
    shape: Shape, prompt: Prompt, group: int, trajectory: int, version: int, part: int, row: Row
) -> Rollout:
    """A row as the step trains on it. Versions by token stay where they differ; version: of a row without any."""
    versions = [version for s in row.segments for version in s.versions or ()]
    segments = row.segments
    if len(set(versions)) <= 1:
        segments = tuple(replace(s, versions=None) if s.versions else s for s in segments)
    if row.prompt != prompt.ids:
        prompt = replace(prompt, ids=row.prompt, text=shape.decode(row.prompt), images=shape.images(prompt, row.prompt))
    if row.adapter is not None:
        prompt = replace(prompt, adapter=row.adapter)
    ids = [i for s in row.segments for i in s.ids]
    return Rollout(
        prompt=prompt,
        group=group,
        segments=segments,
        text=shape.decode(ids, special=False) if row.text is None else row.text,
        finish=row.finish,
        version=versions[0] if versions else version,
        trajectory=trajectory,
        part=part,
        scored=row.scored,
        nodes=row.nodes,
        ends=row.ends,
        call=row.call,
        unfinished=row.goes_on,
        older=row.older,
        turns=row.turns,
        ended="done" if row.turns else "",
        world_score=row.world_score,
    )
