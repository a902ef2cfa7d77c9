"""What an engine is asked for: one request a prompt, and how `Engine.generate` is made of requests side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.batch import PromptImages, Rollout
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion, GenerationBatch, check_fits

if TYPE_CHECKING:
    from posttrain.rollout.engine import ConcurrentEngine


@dataclass(frozen=True)
class Request:
    """n samples of one prompt. `number` is the prompt's among all prompts of the call, whoever works on them."""

    number: int
    ids: tuple[int, ...]
    n: int
    seed: int  # where requests draw from seeds of their own
    max_new_tokens: int
    logprobs: bool
    ends: bool = True  # an end token ends it; False: it has exactly max_new_tokens
    images: PromptImages | None = None  # of the prompt that ids begin with
    adapter: str | None = None  # that answers, of a model with several; None = the first


def requests_of(batch: GenerationBatch) -> list[Request]:
    """What `Engine.generate` asks for, one request a prompt, so that its tokens are computed once."""
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
    """Of how many prompts, from the first on, log-probs are asked for.

    With top-p or top-k vLLM can only report log-probs of the cut and renormalised distribution, which no log-prob of
    the trainer compares with: none are asked for.
    """
    sampling = batch.sampling
    cut = sampling.top_p < 1 or sampling.top_k > 0
    every = len(batch.prompts) if batch.logprobs is True else int(batch.logprobs)
    return 0 if cut and sampling.temperature > 0 else every


def generate_concurrently(engine: ConcurrentEngine, tokenizer: Any, batch: GenerationBatch) -> list[Rollout]:
    """`Engine.generate` by `complete`: all requests at once. Texts are decoded and `done` is called in this thread."""
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
