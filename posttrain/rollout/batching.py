"""Sampling for rollouts that query an engine several times (`StepSampler`), with calls of many rollouts batched into
one.

Batched calls run in the thread that waits for the rollouts' coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import queue
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from posttrain.batch import PromptImages, Rollout, Segment
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion, Engine, GenerationBatch, is_concurrent
from posttrain.rollout.requests import Request, complete_all, wanted_logprobs
from posttrain.shapes.protocol import Grade, Sampled

A = TypeVar("A")
B = TypeVar("B")


class CallBatcher(Generic[A, B]):
    """Collects calls of several members, each known by its number, and answers all waiting calls by one call of
    `answer`. That call runs in the thread of `loop.run_all`, which is given `calls`, so an error in it ends all
    coroutines.

    live: numbers of all members. `answer` is called once every member that has not left is waiting, so that its
    arguments do not depend on timing. None: members do not wait for each other, and each call is answered alone.
    """

    def __init__(
        self,
        answer: Callable[[Mapping[int, A]], Mapping[int, B]],
        calls: queue.SimpleQueue[Callable[[], object]],
        live: Iterable[int] | None,
    ) -> None:
        self.answer, self.calls = answer, calls
        self.live = None if live is None else set(live)
        self.waiting: dict[int, tuple[A, asyncio.Future[B]]] = {}

    @contextlib.contextmanager
    def member(self, number: int) -> Iterator[Callable[[A], Awaitable[B]]]:
        """Yield the function with which this member makes calls; at the end of the block the member leaves. Each number
        is a member once."""
        try:
            yield functools.partial(self._ask, number)
        finally:
            if self.live is not None:
                self.live.discard(number)
                self._call_if_complete()

    async def _ask(self, number: int, what: A) -> B:
        if number in self.waiting:
            raise ValueError(
                "a rollout calls again before its first call has returned: pass several prompts in one call"
            )
        future: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self.waiting[number] = (what, future)
        self._call_if_complete()
        return await future

    def _call_if_complete(self) -> None:
        if self.waiting and (self.live is None or self.waiting.keys() >= self.live):
            waiting, self.waiting = self.waiting, {}
            self.calls.put(functools.partial(self._call, waiting, asyncio.get_running_loop()))

    def _call(self, waiting: Mapping[int, tuple[A, asyncio.Future[B]]], loop: asyncio.AbstractEventLoop) -> None:
        answers = self.answer({number: waiting[number][0] for number in sorted(waiting)})
        loop.call_soon_threadsafe(_set_results, [(waiting[number][1], answers[number]) for number in sorted(waiting)])


def _set_results(pairs: list[tuple[asyncio.Future[B], B]]) -> None:
    for future, answer in pairs:
        if not future.cancelled():
            future.set_result(answer)


class SampleQuery(NamedTuple):
    """Tokens that a rollout wants sampled next: at most `limit` tokens after `ids`."""

    ids: tuple[int, ...]
    limit: int
    images: PromptImages | None = None
    adapter: str | None = None
    greedy: bool = False  # take the most probable tokens, whatever the temperature


Draw = Callable[[tuple[SampleQuery, ...]], Awaitable[list[Sampled]]]
GradeRows = Callable[[list[Rollout]], Awaitable[list[Grade]]]


class StepSampler:
    """Samples for the rollouts of one `generate`, which may query the engine any number of times.

    Rollout i of prompts[p] has number p * n + i, whichever process works on it. A `ConcurrentEngine` serves each query
    independently. Any other engine is called once for all waiting rollouts: once for the k-th query of each, with the
    rollout's number as the index of its prompt. Samples depend on that number, on how often the rollout has queried
    before, and on k.
    """

    def __init__(
        self,
        engine: Engine,
        batch: GenerationBatch,
        seed: Callable[[int, int], int],
        grade: Callable[[Sequence[Rollout]], list[Grade]] | None = None,
    ) -> None:
        """seed: function of (number of earlier queries, k). grade: called with rows to grade, in the thread
        that waits."""
        self.engine, self.batch, self.seed, self.grade = engine, batch, seed, grade
        self.numbers = [p * batch.n + i for p in batch.share for i in range(batch.n)]
        self.wanted = wanted_logprobs(batch) * batch.n
        self.calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.times = itertools.count()
        self.batcher = CallBatcher(self._answer, self.calls, None if is_concurrent(engine) else self.numbers)

    def run(
        self, coroutines: Sequence[Coroutine[Any, Any, A]], finished: Callable[[int, A], None] | None = None
    ) -> list[A]:
        """Run the rollouts to their ends (`loop.run_all`)."""
        return loop.run_all(coroutines, finished, self.calls)

    @contextlib.contextmanager
    def member(self, number: int) -> Iterator[tuple[Draw, GradeRows]]:
        """Yield the functions with which this rollout samples and has rows graded; after the block it makes no more
        calls."""
        with self.batcher.member(number) as ask:
            alone = functools.partial(self._draw_alone, number, itertools.count())
            yield alone if is_concurrent(self.engine) else ask, ask

    async def _draw_alone(self, number: int, times: Iterator[int], queries: tuple[SampleQuery, ...]) -> list[Sampled]:
        """Sample the queries of one rollout at a ConcurrentEngine."""
        engine, time = self.engine, next(times)
        assert is_concurrent(engine)
        version, logprobs = engine.version, number < self.wanted
        requests = [
            Request(
                number, w.ids, 1, self.seed(time, k) + number, w.limit, logprobs, images=w.images, adapter=w.adapter
            )
            for k, w in enumerate(queries)
        ]
        how = [self._sampling_for(w.greedy) for w in queries]
        uid = self.batch.prompts[number // self.batch.n].uid
        return [_as_sampled(completion, version) for completion in await complete_all(engine, requests, how, uid)]

    def _answer(self, asked: Mapping[int, tuple[SampleQuery, ...] | list[Rollout]]) -> dict[int, list[Any]]:
        """Answer all waiting rollouts: one call of `grade` for all rows, and one engine call for the k-th queries."""
        time, found = next(self.times), {number: list[Any]() for number in asked}
        rows = {number: made for number, made in asked.items() if isinstance(made, list)}
        if rows and self.grade is not None:
            grades = iter(self.grade([rollout for made in rows.values() for rollout in made]))
            found |= {number: list(itertools.islice(grades, len(made))) for number, made in rows.items()}
        queries = {number: made for number, made in asked.items() if isinstance(made, tuple)}
        for k, greedy in itertools.product(range(max(map(len, queries.values()), default=0)), (False, True)):
            asking = {n: made[k] for n, made in queries.items() if len(made) > k and made[k].greedy is greedy}
            for number, rollout in self._draw_together(asking, self._sampling_for(greedy), self.seed(time, k)):
                segment = replace(rollout.segments[0], versions=rollout.versions)
                found[number].append(Sampled(segment, rollout.finish, rollout.version))
        return found

    def _draw_together(
        self, queries: Mapping[int, SampleQuery], sampling: Sampling, seed: int
    ) -> Iterable[tuple[int, Rollout]]:
        """Sample one query of each of these rollouts in one call of the engine; yield (rollout's number, sampled
        rollout)."""
        if not queries:
            return ()
        n, logprobs = self.batch.n, self.batch.logprobs
        prompts = [prompt for prompt in self.batch.prompts for _ in range(n)]
        limits = [1] * len(prompts)  # of rollouts without a query
        for number, query in queries.items():
            prompts[number] = replace(prompts[number], ids=query.ids, images=query.images, adapter=query.adapter)
            limits[number] = query.limit
        wanted = logprobs if logprobs is True else int(logprobs) * n
        drawn = self.engine.generate(
            prompts, 1, sampling, seed=seed, logprobs=wanted, share=list(queries), limits=limits
        )
        return zip(queries, drawn, strict=True)

    def _sampling_for(self, greedy: bool) -> Sampling:
        return self.batch.sampling.model_copy(update={"temperature": 0.0}) if greedy else self.batch.sampling


def _as_sampled(completion: Completion, version: int) -> Sampled:
    versions = completion.versions or (version,) * len(completion.ids)
    segment = Segment("model", completion.ids, completion.logps, versions)
    return Sampled(segment, "stop" if completion.finish == "stop" else "length", versions[0] if versions else version)
