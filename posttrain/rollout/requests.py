"""What an engine is asked for: one request a prompt, and how `Engine.generate` is made of requests side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.batch import Prompt, PromptImages, Rollout
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion, as_rollouts, check_fits

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


def requests_of(
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    *,
    seed: int,
    logprobs: bool | int,
    share: Sequence[int] | None,
    limits: Sequence[int] | None = None,
) -> list[Request]:
    """What `Engine.generate` asks for, one request a prompt, so that its tokens are computed once."""
    wanted = wanted_logprobs(logprobs, len(prompts), sampling)
    return [
        Request(
            i,
            tuple(prompts[i].ids),
            n,
            seed + i * n,
            limits[i] if limits else sampling.max_new_tokens,
            i < wanted,
            images=prompts[i].images,
            adapter=prompts[i].adapter,
        )
        for i in (range(len(prompts)) if share is None else share)
    ]


def wanted_logprobs(logprobs: bool | int, prompts: int, sampling: Sampling) -> int:
    """Of how many prompts, from the first on, log-probs are asked for.

    With top-p or top-k vLLM can only report log-probs of the cut and renormalised distribution, which no log-prob of
    the trainer compares with: none are asked for.
    """
    cut = sampling.top_p < 1 or sampling.top_k > 0
    return 0 if cut and sampling.temperature > 0 else prompts if logprobs is True else int(logprobs)


def generate_concurrently(
    engine: ConcurrentEngine,
    tokenizer: Any,
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
    """`Engine.generate` by `complete`: all requests at once. Texts are decoded and `done` is called in this thread."""
    check_fits(prompts, sampling, engine.window, limits)
    requests = requests_of(prompts, n, sampling, seed=seed, logprobs=logprobs, share=share, limits=limits)
    version, made = engine.version, dict[int, list[Rollout]]()

    def on_complete(place: int, samples: list[Completion]) -> None:
        number = requests[place].number
        made[place] = as_rollouts(
            [prompts[number]], n, samples, tokenizer, first_group=first_group + number, version=version
        )
        if done is not None:
            done(made[place])

    loop.run_all([engine.complete(request, sampling) for request in requests], on_complete)
    return [rollout for place in range(len(requests)) for rollout in made[place]]
