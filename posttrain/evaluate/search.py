"""Step-wise beam search: several traces of a prompt grow step by step, a judge scores each step, and the best continue.

The search of Process Reward Agents (arXiv 2604.09482) with a frozen policy. The judge is any function that scores a
partial trace, e.g. a reward model; the evidence that the paper's agent retrieves for a step is in `EvidenceReader`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import queue
import re
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from posttrain.batch import Prompt, Rollout
from posttrain.data.files import not_utf8_error
from posttrain.errors import DataError
from posttrain.path_resolution import find
from posttrain.recipe.eval_sections import Evidence, Search
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.batching import CallBatcher
from posttrain.rollout.engine import Completion, Engine, GenerationBatch, Generator, as_rollouts, is_concurrent
from posttrain.rollout.requests import Request, complete_all
from posttrain.seeds import derive
from posttrain.workflows.documents import find_passages

T = TypeVar("T")
Judge = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class EvidenceReader:
    """Prepends evidence to the question of traces.

    texts: the corpus, None = a column of the row. ends: step delimiters. asks: returns the need for evidence of each
    trace; None = always.
    """

    settings: Evidence
    ends: Sequence[str]
    texts: Sequence[str] | None
    asks: Judge | None = None

    @classmethod
    def from_section(
        cls, settings: Evidence, ends: Sequence[str], base_dir: Path | None, asks: Judge | None = None
    ) -> EvidenceReader:
        """Read the corpus, one text per line. Raises DataError for a corpus that is missing, empty or not UTF-8."""
        if settings.corpus is None:
            return cls(settings, ends, None, asks)
        path = find(settings.corpus, base_dir, "corpus", DataError)
        try:
            texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as cause:
            raise not_utf8_error(path) from cause
        if not texts:
            raise DataError("the corpus is empty", where=str(path), allowed="one text per line")
        return cls(settings, ends, texts, asks)

    def inform(self, traces: Sequence[Rollout]) -> list[Rollout]:
        """Return the traces for the judge, with evidence for the newest step of the traces that need it."""
        needs = [1.0] * len(traces) if self.asks is None else self.asks(traces)
        return [
            self._with_evidence(trace) if need > self.settings.above or self.asks is None else trace
            for trace, need in zip(traces, needs, strict=True)
        ]

    def _with_evidence(self, trace: Rollout) -> Rollout:
        """Return the trace with the retrieved evidence before its question; unchanged if nothing was found."""
        row = trace.prompt.row
        messages = _messages(row)
        question = next((m for m in reversed(messages) if m["role"] == "user"), None)
        if question is None:
            return trace
        found = self._find(str(question["content"]), trace)
        if not found:
            return trace
        question["content"] = self.settings.show(found, str(question["content"]))
        plain = {key: value for key, value in row.items() if key != "messages"}
        return replace(trace, prompt=replace(trace.prompt, row={**plain, "prompt": messages, "messages": messages}))

    def _find(self, question: str, trace: Rollout) -> str:
        """Return the passages that match the question and the newest step, or the row's evidence column as text."""
        if self.texts is None:
            return _as_text(trace.prompt.row.get(self.settings.column or ""))
        steps = [step for step in re.split("|".join(map(re.escape, self.ends)), trace.text) if step.strip()]
        return "\n".join(find_passages(f"{question} {steps[-1] if steps else ''}", self.texts, self.settings.top))


def _as_text(value: Any) -> str:
    """Format a column for the judge: a list as one entry per line, values that are neither text nor number as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple):
        return "\n".join(filter(None, map(_as_text, value)))
    return json.dumps(value, ensure_ascii=False, default=str)


def _messages(row: Any) -> list[dict[str, Any]]:
    """Return a copy of the row's conversation."""
    prompt = row.get("messages") or row.get("prompt")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt or ()]


class Beam(NamedTuple):
    """Flat indices i * branch + j of the surviving candidates, best first, and their cumulative rewards."""

    kept: list[int]
    cumulative: list[float]


def beam_step(
    cumulative: Sequence[float],
    step_rewards: Sequence[Sequence[float]],
    *,
    beam: int,
    finished: Sequence[bool] | None = None,
) -> Beam:
    """Select the best `beam` of all next steps. cumulative [B] of the traces; step_rewards [B][b] of their next steps.

    A finished trace i competes unchanged, as one candidate of index i * b. Ties keep the lower index; if there are
    fewer candidates than `beam`, all stay.
    """
    branch = max((len(row) for row in step_rewards), default=0)
    candidates: list[tuple[float, int]] = []
    for i, (total, rewards) in enumerate(zip(cumulative, step_rewards, strict=True)):
        if finished is not None and finished[i]:
            candidates.append((total, i * branch))
        else:
            candidates += [(total + reward, i * branch + j) for j, reward in enumerate(rewards)]
    best = sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1]))[:beam]
    return Beam([index for _, index in best], [total for total, _ in best])


class StepLabels(NamedTuple):
    """Teacher labels of N steps: `reasoning`, the step is right given the evidence; `search`, the evidence mattered."""

    reasoning: list[int]
    shift: list[float]
    threshold: float | None
    search: list[int]


def step_labels(
    logp1: Sequence[float], logp0: Sequence[float], logp1_doc: Sequence[float], logp0_doc: Sequence[float]
) -> StepLabels:
    """Compute labels for training a process reward agent from log-probs of `1` and `0` [N].

    The log-probs are computed without and with a document. Margins m = logp1 - logp0. reasoning: the margin with the
    document is above 0. search: the absolute shift of the margin is above the median absolute shift.
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
    """A partial completion. `reward` is the sum of its steps' rewards."""

    ids: tuple[int, ...] = ()
    reward: float = 0.0
    steps: int = 0
    finish: str = ""  # "" while it is unfinished

    def score(self, *, mean: bool) -> float:
        """Return the sum, or with `mean` the mean, of the steps' rewards."""
        return self.reward / max(self.steps, 1) if mean else self.reward

    @property
    def completion(self) -> Completion:
        return Completion(self.ids, None, "stop" if self.finish == "stop" else "length")


SampleSteps = Callable[[list[Request]], Awaitable[list[tuple[int, ...]]]]  # `branch` steps for each request
JudgeTraces = Callable[[list[Trace]], Awaitable[list[float]]]


class SearchEngine(Generator):
    """Engine that wraps another engine: one completion per prompt, the best trace of its search.

    Its weights are never synced. Each prompt's search is a coroutine. With a `ConcurrentEngine` the searches run
    independently; otherwise all steps are sampled by one `generate` call and judged by one call.
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
        """Implement `Engine.generate` for n = 1. A trace ends with EOS, at `max_new_tokens`, or after `max_steps`."""
        if batch.n != 1 or len(batch.share) < len(batch.prompts) or batch.logprobs:
            raise ValueError("a search supports only n = 1, without log-probs, in a single process")
        prompts, sampling, seed = batch.prompts, batch.sampling, batch.seed
        self.engine.wake()
        calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        live = None if is_concurrent(self.engine) else range(len(prompts))
        sampling_of = self._sampling_context(prompts, seed, calls)
        judging_of = CallBatcher(functools.partial(self._score_traces, prompts), calls, live).member
        best = loop.run_all(
            [
                self._search(number, prompt, sampling, seed, sampling_of(number), judging_of(number))
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
        drawing: contextlib.AbstractContextManager[SampleSteps],
        judging: contextlib.AbstractContextManager[JudgeTraces],
    ) -> Trace:
        """Return the best trace of one prompt.

        The seed of a step depends on the prompt's number, the step and the trace's index.
        """
        beam, branch, mean = [Trace()], self.settings.branch, self.settings.mean
        with drawing as draw, judging as judge:
            for step in range(self.settings.max_steps):
                growing = [trace for trace in beam if not trace.finish]
                if not growing:
                    break
                first = number * self.settings.beam
                requests = [
                    Request(
                        first + index,
                        (*prompt.ids, *trace.ids),
                        branch,
                        derive(seed, "step", step) + (first + index) * branch,
                        min(self.step_sampling.max_new_tokens, sampling.max_new_tokens - len(trace.ids)),
                        logprobs=False,
                    )
                    for index, trace in enumerate(growing)
                ]
                steps = await draw(requests)
                extended = [self._extend_trace(growing[i // branch], ids, sampling) for i, ids in enumerate(steps)]
                for trace, reward in zip(extended, await judge(extended), strict=True):
                    trace.reward += reward
                beam = self._next_beam(
                    beam, {id(t): extended[i * branch : (i + 1) * branch] for i, t in enumerate(growing)}
                )
        return max(beam, key=lambda t: t.score(mean=mean))

    def _sampling_context(
        self, prompts: Sequence[Prompt], seed: int, calls: queue.SimpleQueue[Callable[[], object]]
    ) -> Callable[[int], contextlib.AbstractContextManager[SampleSteps]]:
        """Return a function from a prompt's number to a context that yields the sampler of its steps."""
        engine, steps, branch = self.engine, itertools.count(), self.settings.branch
        if is_concurrent(engine):

            async def draw(uid: str, requests: list[Request]) -> list[tuple[int, ...]]:
                found = await complete_all(engine, requests, [self.step_sampling] * len(requests), uid)
                return [sample.ids for sample in found]

            return lambda number: contextlib.nullcontext(functools.partial(draw, prompts[number].uid))

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

        return CallBatcher(answer, calls, range(len(prompts))).member

    def _score_traces(self, prompts: Sequence[Prompt], asked: Mapping[int, list[Trace]]) -> dict[int, list[float]]:
        """Return the rewards of the newest steps of each prompt's traces."""
        owners = [prompts[number] for number, traces in asked.items() for _ in traces]
        ends = [trace.completion for traces in asked.values() for trace in traces]
        rewards = self.judge(as_rollouts(owners, 1, ends, self.tokenizer, first_group=0, version=0))
        return _split_by_count(rewards, {number: len(traces) for number, traces in asked.items()})

    def _extend_trace(self, trace: Trace, sampled: tuple[int, ...], sampling: Sampling) -> Trace:
        """Return the trace with one more step, marked as finished at EOS or the token limit."""
        ids = (*trace.ids, *sampled)[: sampling.max_new_tokens]
        ended = "stop" if ids[-1] in self.eos_ids else "length" if len(ids) >= sampling.max_new_tokens else ""
        return dataclasses.replace(trace, ids=ids, steps=trace.steps + 1, finish=ended)

    def _next_beam(self, beam: list[Trace], grown: dict[int, list[Trace]]) -> list[Trace]:
        """Return the next beam: `beam_step` over the current traces and their extensions."""
        branch, mean = self.settings.branch, self.settings.mean
        following = [grown.get(id(trace), [trace]) for trace in beam]
        finished = [id(trace) not in grown for trace in beam]
        totals = [trace.score(mean=mean) for trace in beam]
        gains = [
            [t.score(mean=mean) - total for t in [*options, *[options[0]] * (branch - len(options))]]
            for total, options in zip(totals, following, strict=True)
        ]
        chosen = beam_step(totals, gains, beam=self.settings.beam, finished=finished)
        return [following[index // branch][index % branch] for index in chosen.kept]

    def close(self) -> None:
        self.engine.close()


def _split_by_count(values: Sequence[T], counts: Mapping[int, int]) -> dict[int, list[T]]:
    """Split consecutive values by their counts, per number."""
    remaining = iter(values)
    return {number: list(itertools.islice(remaining, count)) for number, count in counts.items()}
