"""Rollouts of several requests: runs the recipe's shape (`rollout.shape`) or workflow on an engine.

Each rollout is a coroutine of the shape (`posttrain/shapes/`), which queries a `StepSampler`. A rollout depends on
(seed, its place in the step, how often it has queried), not on other rollouts or ranks. Rows that a shape wants graded
are scored in the thread that waits for the rollouts.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain import registry, source_locations, thoughts
from posttrain.batch import Prompt, PromptImages, Rollout, Segment
from posttrain.errors import PosttrainError, RecipeError
from posttrain.recipe.rollout_sections import PlayWorkflow, RolloutShape
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.batching import SampleQuery, StepSampler
from posttrain.rollout.engine import Engine, GenerationBatch, check_fits
from posttrain.rollout.template import TurnSeparator
from posttrain.seeds import derive
from posttrain.shapes.protocol import Asked, Draw, Grade, Row, Sampled

if TYPE_CHECKING:
    from posttrain.models.images import ImageReader

MOST_ROLLOUTS = 65_536  # limit per prompt, that of group_size
GradeRows = Callable[[Sequence[Row]], Awaitable[list[Grade]]]
GradeRollouts = Callable[[Sequence[Rollout]], list[Grade]]


@dataclass(frozen=True)
class Shape:
    """The recipe's shape with its parameters bound. room: tokens by which a row may exceed prompt + max_new_tokens.
    key: its place in the recipe; a workflow may return no rows, if it calls no trained role. learn: for a shape with a
    memory, the function that updates the memory after a step (`Learner.learn`)."""

    name: str
    function: Callable[..., Any]
    tokenizer: Any
    own_group: bool  # the rows of each rollout form a separate group
    room: int
    reads_logps: bool = False  # every rollout needs the engine's log-probs
    grades: bool = False  # grades rows while a rollout runs
    key: Literal["rollout.shape", "rollout.workflow", "workflow"] = "rollout.shape"
    learn: Callable[..., Any] | None = None
    world: Callable[[], Any] | None = None  # makes the environment that the shape acts in
    reader: ImageReader | None = None  # of a vision model

    @classmethod
    def from_recipe(
        cls, section: RolloutShape, base_dir: Path | None, tokenizer: Any, reader: ImageReader | None = None
    ) -> Shape:
        """Bind the recipe's parameters. Raises the errors of `bind_coroutine`."""
        component, function, learner = bind_coroutine(section, base_dir, "rollout.shape")
        defaults = {key: default for key, (_, default) in component.params.items()}
        return cls(
            name=component.name,
            function=function,
            tokenizer=tokenizer,
            own_group=section.may("own_group"),
            room=_count_added_tokens({**defaults, **section.params}, tokenizer),
            reads_logps=section.may("rollout_logp") or ":" in section.use,
            grades=section.may("grades"),
            learn=getattr(learner, "learn", None),
            reader=reader,
        )

    def images(self, prompt: Prompt, ids: tuple[int, ...]) -> PromptImages | None:
        """Return the images that these tokens show: those of the data's prompt, or None. Raises DataError for tokens
        that show only some of them."""
        known = prompt.images
        if known is None or ids[: known.length] == prompt.ids[: known.length]:
            return known
        assert self.reader is not None
        short = self.reader.shorten(ids, known.shown)
        return None if short is None else PromptImages(known.shown, short, len(ids))

    def reply(self, last: int, text: str, most: int) -> tuple[int, ...]:
        """Return the tokens of a user message after the model's token `last`, with at most `most` tokens of
        its text."""
        return TurnSeparator(self.tokenizer).tokens(last, [{"role": "user", "content": text}], most)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens as the model reads it, with special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens as rewards read it."""
        return thoughts.decode(self.tokenizer, [list(ids)])[0]

    def localize(self, text: str) -> str:
        """Return a text with `<think>` and `</think>` as the model writes them."""
        return thoughts.written_format(self.tokenizer).localize(text)


# kind -> (arguments of the coroutine function, signature of a class's `learn`)
_SIGNATURES = {
    "shape": ("asked", "self, memory, ended, step) -> Remembered"),
    "workflow": ("row, call", "self, memory, outcomes, step) -> Learned"),
}


def bind_coroutine(
    section: RolloutShape | PlayWorkflow, base_dir: Path | None, key: str
) -> tuple[registry.Component, Callable[..., Any], Any]:
    """Return the shape or workflow that a section names, as (component, coroutine function with its parameters bound,
    learner). A class with a coroutine function `run` and a method `learn` is instantiated once and is the learner; it
    is None for a function.

    key: the section's place in the recipe. Raises UserError for an unknown name or parameter, and RecipeError for a
    class without `learn` and for anything that is no coroutine function.
    """
    component = section.load(base_dir)
    kind, learner = section.kinds[0], None
    takes, learns = _SIGNATURES[kind]
    function: Any = component.function
    if inspect.isclass(function):
        learner = function(**section.params)
        function = getattr(learner, "run", None)
        if not callable(getattr(learner, "learn", None)):
            raise RecipeError(
                f"{key} `{section.use}` is a class without `learn`",
                allowed=f"def learn({learns}",
                hint=f"a {kind} that learns nothing is a coroutine function",
            )
    if not inspect.iscoroutinefunction(function):
        allowed = f"async def {kind}({takes}, *, KEYS)" if learner is None else f"async def run(self, {takes})"
        raise RecipeError(f"{key} `{section.use}` is no coroutine function", allowed=allowed)
    return component, partial(function, **section.params) if learner is None else function, learner


def rehearse_shape(shape: Shape, prompt: Prompt, sampling: Sampling) -> list[Row]:
    """Return the rows of one rollout whose completions fill their limits, without a model. Raises what the shape
    raises."""

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
    """Return the object that the shape is given for one rollout."""
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
        text=shape.text,
        localize=shape.localize,
        world=shape.world,
        reply=shape.reply,
    )


def _count_added_tokens(params: Mapping[str, Any], tokenizer: Any) -> int:
    """Return the number of tokens by which a row may exceed prompt + max_new_tokens: those of the texts among a shape's
    parameters, and its `answer_tokens`."""
    localize = thoughts.written_format(tokenizer).localize
    texts = [localize(value) for value in params.values() if isinstance(value, str)]
    added = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    return added + int(params.get("answer_tokens") or 0)


def generate_shaped(
    engine: Engine,
    shape: Shape,
    batch: GenerationBatch,
    *,
    group_stride: int,
    grade: GradeRollouts,
    metrics: dict[str, Any],
    begun: Sequence[tuple[Segment, ...]] = (),
    memory: Any = None,
) -> list[Rollout]:
    """Sample n rollouts of each prompt of `batch` and return the rows of each rollout in order; its number is their
    `trajectory`.

    group_stride: distance between the group numbers of a prompt, if each rollout's rows form a group. begun: segments
    that earlier steps have sampled of each prompt's rollouts, () = none. memory: of a workflow. grade: called in this
    thread with rows that a shape wants graded. Adds the number of all sampled tokens, including tokens of no row, to
    `metrics`. Raises RecipeError for an error of a user's function, with its line.
    """
    prompts, n, sampling, seed = batch.prompts, batch.n, batch.sampling, batch.seed
    check_fits([prompts[p] for p in batch.share], sampling, engine.window - shape.room)
    engine.wake()
    sampler = StepSampler(engine, batch, lambda time, k: derive(seed, "shape", time, k), grade)
    drawn: list[int] = []

    async def make(number: int) -> list[Rollout]:
        place, index = divmod(number, n)
        prompt = prompts[place]
        group = batch.first_group + place + (group_stride * index if shape.own_group else 0)
        trajectory = (batch.first_group + place) * MOST_ROLLOUTS + index

        def as_rollouts(rows: Sequence[Row]) -> list[Rollout]:
            made = partial(_as_rollout, shape, prompt, group, trajectory, engine.version)
            return [made(part, row) for part, row in enumerate(rows)]

        with sampler.member(number) as (draw_all, grade_all):

            async def draw(
                asked: Sequence[tuple[int, ...]],
                limits: Sequence[int],
                *,
                greedy: bool = False,
                adapter: str | None = None,
            ) -> list[Sampled]:
                pairs = zip(asked, limits, strict=True)
                queries = (SampleQuery(ids, limit, shape.images(prompt, ids), adapter, greedy) for ids, limit in pairs)
                found = await draw_all(tuple(queries))
                drawn.append(sum(len(completion.ids) for completion in found))
                return [c._replace(by_text=_has_stop_string(shape, sampling.stop, c)) for c in found]

            async def grade_rows(rows: Sequence[Row]) -> list[Grade]:
                return await grade_all(as_rollouts(rows)) if rows else []

            asked = _describe_rollout(shape, prompt, sampling, derive(seed, "shape", number), draw, grade_rows)
            asked = replace(asked, begun=begun[place] if begun else (), memory=memory)
            rows = await _call(shape, asked, prompt)
        return as_rollouts(rows)

    made = sampler.run([make(number) for number in sampler.numbers])
    metrics["rollout/drawn_tokens"] = metrics.get("rollout/drawn_tokens", 0) + sum(drawn)
    found = [rollout for rows in made for rollout in rows]
    _group_calls(found, group_stride)
    return found


def _has_stop_string(shape: Shape, stops: Sequence[str], completion: Sampled) -> bool:
    """Return whether a completion ended with a stop string: it is sampled no further than its first one."""
    text = shape.decode(completion.ids) if stops else ""
    return completion.finish == "stop" and any(stop in text for stop in stops)


def _group_calls(rollouts: Sequence[Rollout], group_stride: int) -> None:
    """Assign groups to the calls of a workflow: for each prompt, numbers in steps of `group_stride`, in the order in
    which its roles were called."""
    known: dict[int, dict[tuple[Any, ...], int]] = {}
    for rollout in rollouts:
        if (call := rollout.call) is not None:
            of_parent = (rollout.trajectory, call.calls[call.number].parent) if call.compared == "parent" else ()
            groups = known.setdefault(rollout.group, {})
            rollout.group += group_stride * groups.setdefault((call.role, *of_parent), len(groups))


async def _call(shape: Shape, asked: Asked, prompt: Prompt) -> list[Row]:
    """Run the shape and return the rows of one rollout. An error of a user's function names the data row."""
    about = f"{shape.key} `{shape.name}` of {source_locations.describe_row(prompt.uid)}"
    try:
        rows = list(await shape.function(asked))
    except PosttrainError:
        raise
    except Exception as error:
        if not (line := registry.find_script_line(error)):
            raise
        raise RecipeError(f"{about}: {type(error).__name__}: {error}", where=line) from error
    strange = next((row for row in rows if not isinstance(row, Row)), None)
    scored = any(row.scored or row.goes_on for row in rows) if strange is None else False
    if strange is not None or (shape.key == "rollout.shape" and not scored):
        what = "no row that is scored" if strange is None else f"{strange!r:.60}"
        raise RecipeError(f"{about} returned {what}", allowed="a list of posttrain.shapes.protocol.Row")
    return rows


def _as_rollout(
    shape: Shape, prompt: Prompt, group: int, trajectory: int, version: int, part: int, row: Row
) -> Rollout:
    """Return a row as the rollout that the step trains on. Token versions are kept only if they differ. version: of a
    row without token versions."""
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
        text=shape.text(ids) if row.text is None else row.text,
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
