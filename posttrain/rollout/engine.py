"""What generates: the Engine protocol, and what all engines share (`make_engine` chooses one).

An engine is given tokens and gives back tokens: text is never tokenised again on the way. Its log-probs are those of
log_softmax(logits / temperature) at the sampled token, before top-p and top-k cut the distribution; at temperature 0
(greedy) those of log_softmax(logits).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

import numpy as np

from posttrain import source_locations
from posttrain.batch import FinishReason, Prompt, Rollout, Segment
from posttrain.errors import DataError, count_noun
from posttrain.recipe.sampling_sections import Sampling

if TYPE_CHECKING:
    from posttrain.rollout.requests import Request


@dataclass(frozen=True)
class GenerationBatch:
    """What `Engine.generate` was asked for, see there. share: the numbers of the prompts that are sampled here."""

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
        """The most tokens of a completion of that prompt."""
        return self.sampling.max_new_tokens if self.limits is None else self.limits[number]

    def rollouts(self, completions: Sequence[Completion], tokenizer: Any, version: int) -> list[Rollout]:
        """What `generate` returns, of the completions in that order; see `as_rollouts`."""
        about: dict[str, Any] = {"first_group": self.first_group, "version": version, "share": self.share}
        return as_rollouts(self.prompts, self.n, completions, tokenizer, **about)


class Generator(Protocol):
    """Samples completions of prompts: engines, and what asks an engine several times for a completion."""

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
        """n completions of each prompt, group-major: those of prompts[i] are at i*n ... i*n+n-1, group first_group + i.

        Same seed, same prompts, same weights: same rollouts. Completion ids include the EOS token, or the token that
        completed a stop string. logprobs=False leaves the segments' logps None; a number asks for
        those of the first so many prompts at least. Raises DataError for a prompt that does not fit the window.

        share: sample only the prompts of these numbers, rising. Their groups keep their numbers, and (transformers;
        vLLM where requests have seeds of their own) their completions are those that all prompts together would have
        given: what is sampled does not depend on how many processes share the work.

        done: called with the rollouts of a prompt as soon as all have ended, where the engine knows when: in any order,
        each prompt once at most, maybe in another thread. They are the objects that are returned in the end.

        limits: the most tokens of a completion of each prompt, up to sampling.max_new_tokens, which is the default.
        """
        mine = range(len(prompts)) if share is None else share
        return self.generate_batch(
            GenerationBatch(prompts, n, sampling, seed, mine, first_group, logprobs, done, limits)
        )

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """What `generate` returns."""
        ...

    def close(self) -> None: ...


class Engine(Generator, Protocol):
    """Samples completions with the weights it was last synced with."""

    version: int  # policy version of the weights that it holds
    window: int  # longest prompt + completion in tokens
    gap: float  # what `probe` gave right after the last sync
    apart: bool  # it can generate while the trainer changes its weights: it has its own, and does not sleep meanwhile

    def sync(self, model: Any, version: int) -> None:
        """Hold the weights of `model` from now on and call them `version`."""
        ...

    def probe(self, model: Any) -> float:
        """Mean absolute gap of log-probs, engine against `model`, on one fixed sequence; 0 if weights are shared."""
        ...

    def sleep(self) -> None:
        """Free the memory that only generation needs. `wake` comes before the next `generate`."""
        ...

    def wake(self) -> None: ...


class ConcurrentEngine(Engine, Protocol):
    """An Engine that works on requests as they come, each for itself; several threads may call `generate` at once.

    Others generate one batch at a time.
    """

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """n samples of one prompt, in the loop of `posttrain.rollout.loop`. Cancelling it gives the request up.

        What it samples depends on the weights and the request with its seed, not on other requests. It waits while
        weights are replaced. A request that a sync cuts short goes on with the new weights: `Completion.versions` says
        which version sampled each token, and no finish is `paused`.
        """
        ...


def is_concurrent(engine: Engine) -> TypeGuard[ConcurrentEngine]:
    """Whether the engine works on requests as they come."""
    return inspect.iscoroutinefunction(getattr(engine, "complete", None))


def needed_length(prompts: Sequence[Prompt], sampling: Sampling) -> int:
    """The window that these prompts need, in tokens."""
    return max((len(p.ids) for p in prompts), default=0) + sampling.max_new_tokens


def check_fits(prompts: Sequence[Prompt], sampling: Sampling, window: int, limits: Sequence[int] | None = None) -> None:
    """Raise DataError naming the rows whose prompt + max_new_tokens exceed `window`. Call before step 0.

    limits: new tokens of each prompt instead; the caller has measured them, so too long a prompt is our mistake.
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
        where=source_locations.row(worst.uid),
        allowed=f"prompts up to {count_noun(max(room, 0), 'token')}",
        hint=(f"set data.max_length: {room} to drop longer prompts, or " if room > 0 else "")
        + (f"write max_new_tokens: {left} or less" if left > 0 else "lower max_new_tokens"),
    )


@dataclass(frozen=True)
class Completion:
    """What an engine sampled for one row. logps has one number a token, or is None if none were asked for.

    finish `paused`: there is more to sample, see `partial`. versions: of the policy, for each token, None = the one
    that the engine holds.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...] | None
    finish: FinishReason | Literal["paused"]
    versions: tuple[int, ...] | None = None


class StatelessEngine(Generator):
    """What an Engine does that holds no weights of its own: there is nothing to send, to compare or to give back."""

    version = 0
    gap = 0.0
    apart = False

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
    """Completions in group-major order as rollouts; text is decoded without special tokens. share: they are only of
    these prompts."""
    numbers = range(len(prompts)) if share is None else share
    if not completions:  # batch_decode makes one text of no rows
        return []
    texts = tokenizer.batch_decode(  # of a list it would look at the type of each number
        [np.array(c.ids, np.int64) for c in completions], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
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
