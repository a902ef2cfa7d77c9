"""Scripted engines that return given texts, for tests of everything after generation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Completion, GenerationBatch, StatelessEngine
from posttrain.rollout.requests import Request, generate_concurrently

CALLED = ("n", "seed", "first_group")  # of a batch, in `ScriptedEngine.calls`
Script = Mapping[str, Sequence[str]] | Callable[[Prompt, int], str]


class ScriptedEngine(StatelessEngine):
    """An Engine whose completions are given in advance.

    script: completions by prompt uid (sample i of a prompt is text i, modulo their number), or a function of (prompt,
    sample index). A text that fits max_new_tokens gets the EOS token and finish "stop"; a longer one is truncated.
    Log-probs are `logp` for every token. `calls` records the keyword arguments of every `generate`.
    """

    def __init__(self, script: Script, tokenizer: Any, *, logp: float = -1.0, window: int = 1 << 30) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.logp = logp
        self.window = window
        self.calls: list[dict[str, Any]] = []

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        prompts = batch.prompts
        self.calls.append({"prompts": [p.uid for p in prompts], **{k: getattr(batch, k) for k in CALLED}})
        completions = [
            self._completion(prompts[number], i, batch.limit(number), bool(batch.logprobs))
            for number in batch.share
            for i in range(batch.n)
        ]
        return batch.rollouts(completions, self.tokenizer, self.version)

    def _completion(self, prompt: Prompt, sample: int, limit: int, logprobs: bool) -> Completion:
        ids = self.tokenizer.encode(self._text(prompt, sample), add_special_tokens=False)
        fits = len(ids) < limit
        ids = [*ids, self.tokenizer.eos_token_id] if fits else ids[:limit]
        return Completion(tuple(ids), (self.logp,) * len(ids) if logprobs else None, "stop" if fits else "length")

    def _text(self, prompt: Prompt, sample: int) -> str:
        if callable(self.script):
            return self.script(prompt, sample)
        if prompt.uid not in self.script:
            raise EngineError(f"the script has no completion for prompt {prompt.uid}")
        texts = self.script[prompt.uid]
        return texts[sample % len(texts)]


class ConcurrentScriptedEngine(StatelessEngine):
    """A ConcurrentEngine whose completions are given in advance.

    script: the text of a request's sample. A text that fits max_new_tokens gets the EOS token and finish "stop"; a
    longer one is truncated. before_token: awaited before each token, as (request, sample, number of the token), so that
    a test controls how long each takes: `asyncio.sleep`, an event. A token has the engine's version at the end of that
    wait. Log-probs are `logp` for every token. `asked` records the requests in the order of their arrival.
    """

    def __init__(
        self,
        script: Callable[[Request, int], str],
        tokenizer: Any,
        *,
        before_token: Callable[[Request, int, int], Awaitable[object]] | None = None,
        logp: float = -1.0,
        window: int = 1 << 30,
    ) -> None:
        self.script, self.tokenizer, self.before_token = script, tokenizer, before_token
        self.logp, self.window = logp, window
        self.asked: list[Request] = []

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """See `ConcurrentEngine.complete`; the samples of a request are written concurrently."""
        del sampling
        self.asked.append(request)
        return list(await asyncio.gather(*(self._written(request, sample) for sample in range(request.n))))

    async def _written(self, request: Request, sample: int) -> Completion:
        ids = self.tokenizer.encode(self.script(request, sample), add_special_tokens=False)
        fits = len(ids) < request.max_new_tokens
        ids = [*ids, self.tokenizer.eos_token_id] if fits else ids[: request.max_new_tokens]
        versions = []
        for token in range(len(ids)):
            if self.before_token is not None:
                await self.before_token(request, sample, token)
            versions.append(self.version)
        logps = (self.logp,) * len(ids) if request.logprobs else None
        return Completion(tuple(ids), logps, "stop" if fits else "length", tuple(versions))

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """See `Engine.generate`: all requests concurrently."""
        return generate_concurrently(self, self.tokenizer, batch)


class MiscountingEngine(ConcurrentScriptedEngine):
    """A ConcurrentScriptedEngine that returns `count` times the requested samples."""

    count = 0

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        return [*await super().complete(request, sampling)] * self.count
