"""Requests to an engine, one per prompt, and `Engine.generate` as concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.batch import PromptImages, Rollout
from posttrain.errors import EngineError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion, GenerationBatch, check_fits

if TYPE_CHECKING:
    from posttrain.rollout.engine import ConcurrentEngine


@dataclass(frozen=True)
class Request:
    """n samples of one prompt. number: index of the prompt among all prompts of the call, on whichever process."""

    number: int
    ids: tuple[int, ...]
    n: int
    seed: int  # for engines with a seed per request
    max_new_tokens: int
    logprobs: bool
    ends: bool = True  # an end token ends a sample; False: each has exactly max_new_tokens
    images: PromptImages | None = None  # of the prompt at the start of ids
    adapter: str | None = None  # name of the adapter to use, if there are several; None = the first
    in_chunks: bool = False  # vLLM may send the tokens in chunks: nothing reads them before the sample ends


def requests_of(batch: GenerationBatch) -> list[Request]:
    """Return the requests of an `Engine.generate` call, one per prompt, so that each prompt is computed once."""
    wanted = wanted_logprobs(batch)
    return [
        Request(
            number,
            tuple(batch.prompts[number].ids),
            batch.n,
            batch.seed + number * batch.n,
            batch.limit(number),
            number < wanted,
            images=batch.prompts[number].images,
            adapter=batch.prompts[number].adapter,
        )
        for number in batch.share
    ]


def wanted_logprobs(batch: GenerationBatch) -> int:
    """Return the number of prompts, counted from the first, for which log-probs are requested.

    With top-p or top-k, vLLM can only report log-probs of the truncated and renormalized distribution, which cannot be
    compared with the trainer's: none are requested.
    """
    sampling = batch.sampling
    cut = sampling.top_p < 1 or sampling.top_k > 0
    every = len(batch.prompts) if batch.logprobs is True else int(batch.logprobs)
    return 0 if cut and sampling.temperature > 0 else every


async def complete_all(
    engine: ConcurrentEngine, requests: Sequence[Request], samplings: Sequence[Sampling], uid: str
) -> list[Completion]:
    """Return the samples of several requests for one prompt, in order; `Engine.generate` for a coroutine.

    Raises EngineError, with the prompt's uid, unless each request has its n samples.
    """
    found = await asyncio.gather(*map(engine.complete, requests, samplings))
    for request, samples in zip(requests, found, strict=True):
        if len(samples) != request.n:
            raise EngineError(f"the engine returned {len(samples)} of {request.n} completions of prompt {uid}")
    return [sample for samples in found for sample in samples]


def generate_concurrently(engine: ConcurrentEngine, tokenizer: Any, batch: GenerationBatch) -> list[Rollout]:
    """`Engine.generate` for a ConcurrentEngine: complete all requests concurrently. Decodes texts and calls `done` in
    this thread."""
    check_fits(batch.prompts, batch.sampling, engine.window, batch.limits)
    requests = requests_of(batch)
    version, made = engine.version, dict[int, list[Rollout]]()

    def on_complete(place: int, samples: list[Completion]) -> None:
        number = requests[place].number
        made[place] = replace(batch, share=[number]).rollouts(samples, tokenizer, version)
        if batch.done is not None:
            batch.done(made[place])

    loop.run_all([engine.complete(request, batch.sampling) for request in requests], on_complete)
    return [rollout for place in range(len(requests)) for rollout in made[place]]
