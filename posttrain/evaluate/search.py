"""Step-wise decoding: several traces of a prompt grow a step at a time, a judge scores each step, the best go on.

The search of Process Reward Agents (arXiv 2604.09482) with a frozen policy. The judge is whatever scores a trace so
far, e.g. a reward model; what it retrieves for a step, the agent's second reading, is in `evidence`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import queue
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from posttrain.batch import Prompt, Rollout
from posttrain.recipe.eval_sections import Search
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.batching import Batch
from posttrain.rollout.engine import Completion, Engine, GenerationBatch, Generator, as_rollouts, is_concurrent
from posttrain.rollout.requests import Request
from posttrain.seeds import derive

T = TypeVar("T")
Judge = Callable[[Sequence[Rollout]], Sequence[float]]


class Beam(NamedTuple):
    """Flat indices i * branch + j of the candidates that stay, best first, and their cumulative rewards."""

    kept: list[int]
    cumulative: list[float]


def beam_step(
    cumulative: Sequence[float],
    step_rewards: Sequence[Sequence[float]],
    *,
    beam: int,
    finished: Sequence[bool] | None = None,
) -> Beam:
    """The best `beam` of all next steps. cumulative [B] of the traces; step_rewards [B][b] of their next steps.

    A finished trace i competes unchanged, as one candidate of index i * b. Ties keep the lower index; where there are
    fewer candidates, all stay.
    """
    branch = max((len(row) for row in step_rewards), default=0)
    candidates: list[tuple[float, int]] = []
    for i, (total, rewards) in enumerate(zip(cumulative, step_rewards, strict=True)):
        if finished is not None and finished[i]:
            candidates.append((total, i * branch))
        else:
            candidates += [(total + reward, i * branch + j) for j, reward in enumerate(rewards)]
    best = sorted(candidates, key=lambda one: (-one[0], one[1]))[:beam]
    return Beam([index for _, index in best], [total for total, _ in best])


class StepLabels(NamedTuple):
    """What a teacher says of N steps: `reasoning`, it is right given the evidence; `search`, the evidence mattered."""

    reasoning: list[int]
    shift: list[float]
    threshold: float | None
    search: list[int]


def step_labels(
    logp1: Sequence[float], logp0: Sequence[float], logp1_doc: Sequence[float], logp0_doc: Sequence[float]
) -> StepLabels:
    """Labels for training a process reward agent, from log-probs of `1` and `0` without and with a document [N].

    Margins m = logp1 - logp0. reasoning: the margin with the document is above 0. search: its shift is, in size, above
    the median shift.
    """
    bare = [a - b for a, b in zip(logp1, logp0, strict=True)]
    informed = [a - b for a, b in zip(logp1_doc, logp0_doc, strict=True)]
    shift = [a - b for a, b in zip(bare, informed, strict=True)]
    threshold = statistics.median(map(abs, shift)) if shift else None
    return StepLabels(
        [int(margin > 0) for margin in informed],
        shift,
        threshold,
        [int(threshold is not None and abs(s) > threshold) for s in shift],
    )


@dataclass
class Trace:
    """A completion that grows. `reward` is the sum of its steps' rewards."""

    ids: tuple[int, ...] = ()
    reward: float = 0.0
    steps: int = 0
    finish: str = ""  # "" while it grows

    def score(self, *, mean: bool) -> float:
        return self.reward / max(self.steps, 1) if mean else self.reward

    @property
    def completion(self) -> Completion:
        return Completion(self.ids, None, "stop" if self.finish == "stop" else "length")


Draw = Callable[[list[Request]], Awaitable[list[tuple[int, ...]]]]  # `branch` steps for each request
Rate = Callable[[list[Trace]], Awaitable[list[float]]]


class SearchEngine(Generator):
    """An Engine around another: one completion a prompt, the best trace that the search finds. It is never synced.

    Each prompt's search is a coroutine. With a `ConcurrentEngine` it waits for no other; else all steps are sampled by
    one `generate` and judged by one call.
    """

    def __init__(
        self, engine: Engine, settings: Search, judge: Judge, tokenizer: Any, eos_ids: Sequence[int], sampling: Sampling
    ) -> None:
        self.engine, self.settings, self.judge = engine, settings, judge
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.window = engine.window
        room = min(settings.step_tokens, sampling.max_new_tokens)
        self.step_sampling = sampling.model_copy(update={"stop": list(settings.ends), "max_new_tokens": room})

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """`Engine.generate` for n = 1. A trace ends with EOS, at `max_new_tokens`, or after `max_steps`."""
        if batch.n != 1 or len(batch.share) < len(batch.prompts) or batch.logprobs:
            raise ValueError("a search gives one completion a prompt, without log-probs, in one process")
        prompts, sampling, seed = batch.prompts, batch.sampling, batch.seed
        self.engine.wake()
        calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        live = None if is_concurrent(self.engine) else range(len(prompts))
        drawing = self._sampling_context(prompts, seed, calls)
        judging = Batch(functools.partial(self._score_traces, prompts), calls, live).member
        best = loop.run_all(
            [
                self._search(number, prompt, sampling, seed, drawing(number), judging(number))
                for number, prompt in enumerate(prompts)
            ],
            calls=calls,
        )
        ends = [trace.completion for trace in best]
        found = as_rollouts(prompts, 1, ends, self.tokenizer, first_group=batch.first_group, version=0)
        for rollout, trace in zip(found, best, strict=True):
            rollout.scores = {"search/reward": trace.score(mean=self.settings.mean), "search/steps": float(trace.steps)}
        return found

    async def _search(
        self,
        number: int,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        drawing: contextlib.AbstractContextManager[Draw],
        judging: contextlib.AbstractContextManager[Rate],
    ) -> Trace:
        """The best trace of one prompt. A step draws by the prompt's number, the step and the trace's place."""
        beam, branch, mean = [Trace()], self.settings.branch, self.settings.mean
        with drawing as draw, judging as judge:
            for step in range(self.settings.max_steps):
                growing = [trace for trace in beam if not trace.finish]
                if not growing:
                    break
                first = number * self.settings.beam
                requests = [
                    Request(
                        first + place,
                        (*prompt.ids, *trace.ids),
                        branch,
                        derive(seed, "step", step) + (first + place) * branch,
                        min(self.step_sampling.max_new_tokens, sampling.max_new_tokens - len(trace.ids)),
                        logprobs=False,
                    )
                    for place, trace in enumerate(growing)
                ]
                drawn = await draw(requests)
                made = [self._after(growing[i // branch], ids, sampling) for i, ids in enumerate(drawn)]
                for trace, reward in zip(made, await judge(made), strict=True):
                    trace.reward += reward
                beam = self._next_beam(
                    beam, {id(t): made[i * branch : (i + 1) * branch] for i, t in enumerate(growing)}
                )
        return max(beam, key=lambda t: t.score(mean=mean))

    def _sampling_context(
        self, prompts: Sequence[Prompt], seed: int, calls: queue.SimpleQueue[Callable[[], object]]
    ) -> Callable[[int], contextlib.AbstractContextManager[Draw]]:
        """Number of a prompt -> around its search, what draws its steps."""
        engine, steps, branch = self.engine, itertools.count(), self.settings.branch
        if is_concurrent(engine):

            async def draw(requests: list[Request]) -> list[tuple[int, ...]]:
                found = await asyncio.gather(*(engine.complete(request, self.step_sampling) for request in requests))
                return [sample.ids for samples in found for sample in samples]

            return lambda _: contextlib.nullcontext(draw)

        def answer(asked: Mapping[int, list[Request]]) -> dict[int, list[tuple[int, ...]]]:
            pairs = [(number, request) for number, requests in asked.items() for request in requests]
            sampled = engine.generate(
                [dataclasses.replace(prompts[number], ids=request.ids) for number, request in pairs],
                branch,
                self.step_sampling,
                seed=derive(seed, "step", next(steps)),
                logprobs=False,
                limits=[request.max_new_tokens for _, request in pairs],
            )
            return _split_by_count(
                [r.ids for r in sampled], {n: len(requests) * branch for n, requests in asked.items()}
            )

        return Batch(answer, calls, range(len(prompts))).member

    def _score_traces(self, prompts: Sequence[Prompt], asked: Mapping[int, list[Trace]]) -> dict[int, list[float]]:
        """The rewards of the newest steps of each prompt's traces."""
        owners = [prompts[number] for number, traces in asked.items() for _ in traces]
        ends = [trace.completion for traces in asked.values() for trace in traces]
        rewards = self.judge(as_rollouts(owners, 1, ends, self.tokenizer, first_group=0, version=0))
        return _split_by_count(rewards, {number: len(traces) for number, traces in asked.items()})

    def _after(self, trace: Trace, sampled: tuple[int, ...], sampling: Sampling) -> Trace:
        ids = (*trace.ids, *sampled)[: sampling.max_new_tokens]
        ended = "stop" if ids[-1] in self.eos_ids else "length" if len(ids) >= sampling.max_new_tokens else ""
        return dataclasses.replace(trace, ids=ids, steps=trace.steps + 1, finish=ended)

    def _next_beam(self, beam: list[Trace], grown: dict[int, list[Trace]]) -> list[Trace]:
        """The next beam: `beam_step` over this one's traces and what they may become."""
        branch, mean = self.settings.branch, self.settings.mean
        following = [grown.get(id(trace), [trace]) for trace in beam]
        finished = [id(trace) not in grown for trace in beam]
        totals = [trace.score(mean=mean) for trace in beam]
        gains = [
            [t.score(mean=mean) - total for t in [*new, *[new[0]] * (branch - len(new))]]
            for total, new in zip(totals, following, strict=True)
        ]
        chosen = beam_step(totals, gains, beam=self.settings.beam, finished=finished)
        return [following[index // branch][index % branch] for index in chosen.kept]

    def close(self) -> None:
        self.engine.close()


def _split_by_count(values: Sequence[T], counts: Mapping[int, int]) -> dict[int, list[T]]:
    """The values of each number, which stand one after the other."""
    left = iter(values)
    return {number: list(itertools.islice(left, count)) for number, count in counts.items()}
