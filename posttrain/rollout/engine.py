"""The Engine protocol, and what all generation engines share (`make_engine` chooses one).

An engine takes token ids and returns token ids: text is never re-tokenized on the way. Its log-probs are
log_softmax(logits / temperature) at the sampled token, before top-p and top-k cut the distribution; at temperature 0
(greedy) they are log_softmax(logits).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

import numpy as np

from posttrain import source_locations, thoughts
from posttrain.batch import FinishReason, Prompt, Rollout, Segment
from posttrain.errors import DataError, EngineError, count_noun
from posttrain.recipe.sampling_sections import Sampling

if TYPE_CHECKING:
    from posttrain.rollout.requests import Request


@dataclass(frozen=True)
class GenerationBatch:
    """Arguments of `Engine.generate` as one object. share: indices of the prompts that this process samples."""

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    seed: int
    share: Sequence[int]
    first_group: int = 0
    logprobs: bool | int = True
    done: Callable[[list[Rollout]], None] | None = None
    limits: Sequence[int] | None = None

    def limit(self, number: int) -> int:
        """Return the maximum number of completion tokens for the prompt with this index."""
        return self.sampling.max_new_tokens if self.limits is None else self.limits[number]

    def rollouts(self, completions: Sequence[Completion], tokenizer: Any, version: int) -> list[Rollout]:
        """Return the completions, in the order of `share`, as the rollouts that `generate` returns (`as_rollouts`)."""
        about: dict[str, Any] = {"first_group": self.first_group, "version": version, "share": self.share}
        return as_rollouts(self.prompts, self.n, completions, tokenizer, **about)


class Generator(Protocol):
    """Samples completions of prompts: an engine, or a wrapper that queries an engine several times per completion."""

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
        """Return n completions of each prompt, group-major: prompts[i] has indices i*n ... i*n+n-1 and group
        first_group + i.

        Deterministic in seed, prompts and weights. Completion ids include the EOS token, or the token that completed a
        stop string. logprobs=False leaves the segments' logps None; a number requests log-probs for at least that many
        prompts, counted from the first. Raises DataError for a prompt that does not fit the window.

        share: sample only the prompts with these indices, in ascending order. Their groups keep their numbers. With
        transformers, and with vLLM where each request has its own seed, the completions equal those that sampling all
        prompts would give: the result does not depend on how many processes share the work.

        done: called with the rollouts of a prompt as soon as all of them have ended, if the engine knows when: in any
        order, at most once per prompt, possibly in another thread. `generate` returns the same objects in the end.

        limits: maximum number of completion tokens for each prompt, at most sampling.max_new_tokens (the default).
        """
        numbers = range(len(prompts)) if share is None else share
        return self.generate_batch(
            GenerationBatch(prompts, n, sampling, seed, numbers, first_group, logprobs, done, limits)
        )

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Return what `generate` returns."""
        ...

    def close(self) -> None: ...


class Engine(Generator, Protocol):
    """Samples completions with the weights it was last synced with."""

    version: int  # policy version of the engine's weights
    window: int  # maximum length of prompt + completion in tokens
    gap: float  # result of `probe` right after the last sync
    generates_during_updates: bool  # it has its own weights and does not sleep meanwhile

    def sync(self, model: Any, version: int) -> None:
        """Load the weights of `model` and label them with this policy version."""
        ...

    def probe(self, model: Any) -> float:
        """Return the mean absolute gap between log-probs of the engine and of `model` on one fixed sequence; 0 if both
        share their weights."""
        ...

    def sleep(self) -> None:
        """Free the memory that only generation needs. Call `wake` before the next `generate`."""
        ...

    def wake(self) -> None: ...


class ConcurrentEngine(Engine, Protocol):
    """An Engine that serves requests independently as they arrive; several threads may call `generate` concurrently.

    Any other engine generates one batch at a time.
    """

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Return n samples of one prompt; runs in the loop of `posttrain.rollout.loop`. Cancelling it aborts the
        request.

        The samples depend on the weights and on the request with its seed, not on other requests. The call waits while
        weights are replaced. A request that a sync interrupts continues with the new weights: `Completion.versions`
        holds the version that sampled each token, and no finish is `paused`.
        """
        ...


def is_concurrent(engine: Engine) -> TypeGuard[ConcurrentEngine]:
    """Return whether the engine serves requests as they arrive (has a coroutine method `complete`)."""
    return inspect.iscoroutinefunction(getattr(engine, "complete", None))


def needed_length(prompts: Sequence[Prompt], sampling: Sampling) -> int:
    """Return the window in tokens that these prompts need: the longest prompt plus max_new_tokens."""
    return max((len(p.ids) for p in prompts), default=0) + sampling.max_new_tokens


def check_fits(prompts: Sequence[Prompt], sampling: Sampling, window: int, limits: Sequence[int] | None = None) -> None:
    """Raise DataError with the rows whose prompt + max_new_tokens exceeds `window`. Call it before step 0.

    limits: new tokens of each prompt in place of max_new_tokens. The caller has computed them, so a prompt that is too
    long is a bug and raises ValueError.
    """
    if limits is not None:
        too_long = [p.uid for p, new in zip(prompts, limits, strict=True) if len(p.ids) + new > window]
        if too_long:
            raise ValueError(f"turns of rows {too_long} exceed the window of {window} tokens")
        return
    room = window - sampling.max_new_tokens
    over = [p for p in prompts if len(p.ids) > room]
    if not over:
        return
    worst = max(over, key=lambda p: len(p.ids))
    left = window - len(worst.ids)
    raise DataError(
        f"prompt of {count_noun(len(worst.ids), 'token')} + {sampling.max_new_tokens} new ones exceed the window of "
        f"{count_noun(window, 'token')}"
        + (f" ({len(over)} rows are too long; this is the longest)" if len(over) > 1 else ""),
        where=source_locations.describe_row(worst.uid),
        allowed=f"prompts up to {count_noun(max(room, 0), 'token')}",
        hint=(f"set data.max_length: {room} to drop longer prompts, or " if room > 0 else "")
        + (f"write max_new_tokens: {left} or less" if left > 0 else "lower max_new_tokens"),
    )


@dataclass(frozen=True)
class Completion:
    """Tokens that an engine sampled for one row. logps has one number per token; None if none were requested.

    finish `paused`: the sample is interrupted and continues later (`partial`). versions: policy version of each token;
    None: the version that the engine holds.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...] | None
    finish: FinishReason | Literal["paused"]
    versions: tuple[int, ...] | None = None


class StatelessEngine(Generator):
    """Base of engines without weights of their own: nothing to send, compare or free."""

    version = 0
    gap = 0.0
    generates_during_updates = False

    def sync(self, model: Any, version: int) -> None:
        del model
        self.version = version

    def probe(self, model: Any) -> float:
        del model
        return 0.0

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def as_rollouts(
    prompts: Sequence[Prompt],
    n: int,
    completions: Sequence[Completion],
    tokenizer: Any,
    *,
    first_group: int,
    version: int,
    share: Sequence[int] | None = None,
) -> list[Rollout]:
    """Return completions in group-major order as rollouts; texts are decoded by `thoughts.decode`. share: indices of
    the prompts that the completions belong to; None: all prompts. Raises EngineError unless there are n of each."""
    numbers = range(len(prompts)) if share is None else share
    if len(completions) != n * len(numbers):
        whose = f"prompt {prompts[numbers[0]].uid}" if len(numbers) == 1 else count_noun(len(numbers), "prompt")
        raise EngineError(f"the engine returned {len(completions)} of {n * len(numbers)} completions of {whose}")
    # arrays: for a list batch_decode checks the type of every number
    texts = thoughts.decode(tokenizer, [np.array(c.ids, np.int64) for c in completions])
    return [
        Rollout(
            prompt=prompts[numbers[i // n]],
            group=first_group + numbers[i // n],
            segments=(Segment("model", c.ids, c.logps, c.versions if len(set(c.versions or ())) > 1 else None),),
            text=text,
            finish="stop" if c.finish == "stop" else "length",
            version=c.versions[0] if c.versions else version,
        )
        for i, (c, text) in enumerate(zip(completions, texts, strict=True))
    ]
