"""What engines have in common that hold weights of their own: those of the trainer are pushed to them and compared.

`VllmEngine` is such an engine inside the trainer's process, `ServerEngine` one in other processes. Both are asked for
`Request`s, so that seeds, log-probs and shares mean the same wherever vLLM runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError, RecipeError
from posttrain.models import adapters
from posttrain.models.precision import compute_dtype
from posttrain.models.rounding import logp_tolerance
from posttrain.recipe.rollout_sections import Sampling, Vllm
from posttrain.rollout import vllm_start, weights
from posttrain.rollout.engine import Completion, as_rollouts, check_fits
from posttrain.rollout.partial import Gate, complete
from posttrain.rollout.probe import Seen, mean_gap, probe_ids, trainer_logps
from posttrain.rollout.requests import Request as Request
from posttrain.rollout.requests import requests_of as requests_of

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

PROBE_LENGTH = 32

Done = Callable[[int, list[Completion]], None]  # called with a request's place in the list, once it is finished


class PushedEngine(ABC):
    """The trainer's half of such an engine. A subclass completes requests, takes weights, and reports log-probs."""

    def __init__(self, section: Vllm, loaded: LoadedModel, *, max_len: int) -> None:
        self.section = section
        self.loaded = loaded
        self.window = window_of(section, loaded, max_len)
        self.version = 0
        self.gap = 0.0
        self.apart = False
        self.ids = probe_ids(loaded.tokenizer, min(PROBE_LENGTH, self.window - 1))
        self.dtype = engine_dtype(loaded)
        self.gate = Gate()
        self.seen: list[Seen] = []  # of each copy of the weights, when it last changed
        if loaded.is_lora:
            adapters.check_addable(loaded.model.get_base_model())
        self.lora_rank = None if section.merge_adapter else adapter_rank(loaded)  # None: whole weights are pushed
        if self.lora_rank is not None:
            vllm_start.check_adapter(loaded.model.get_base_model())

    @abstractmethod
    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, done: Done | None = None
    ) -> list[list[Completion]]:
        """The samples of each request, in order. `done` hears of each as soon as it is finished, if it can. After
        `pause` they may be `paused` ones."""

    def pause(self) -> None:  # noqa: B027  nothing to do for an engine that never generates beside the trainer
        """Have `complete`, in another thread, return soon with what was sampled. It may have returned already."""

    @abstractmethod
    def push(self, model: Any, version: int, whole: Iterator[tuple[str, Tensor]]) -> None:
        """Hold the weights of `model`: its adapter where there is a `lora_rank`, else all of them, `whole`."""

    @abstractmethod
    def logps(self) -> list[list[float]]:
        """Log-probs of `self.ids` by every copy of the weights that the engine holds."""

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
        """See `Engine.generate`."""
        check_fits(prompts, sampling, self.window, limits)
        requests = requests_of(prompts, n, sampling, seed=seed, logprobs=logprobs, share=share, limits=limits)
        tokenizer, version, told = self.loaded.tokenizer, self.version, dict[int, list[Rollout]]()

        def heard(place: int, samples: list[Completion]) -> None:
            number = requests[place].number
            first = first_group + number
            told[place] = as_rollouts([prompts[number]], n, samples, tokenizer, first_group=first, version=version)
            assert done is not None
            done(told[place])

        found = complete(
            lambda asked, seed, done: self.complete(asked, sampling, seed=seed, done=done),
            self.gate,
            lambda: self.version,
            requests,
            seed=seed,
            done=None if done is None else heard,
        )
        left = [place for place in range(len(requests)) if place not in told]
        rest = as_rollouts(
            prompts,
            n,
            [c for place in left for c in found[place]],
            tokenizer,
            first_group=first_group,
            version=version,
            share=[requests[place].number for place in left],
        )
        told |= {place: rest[i * n : (i + 1) * n] for i, place in enumerate(left)}
        return [rollout for place in range(len(requests)) for rollout in told[place]]

    def sync(self, model: Any, version: int) -> None:
        """Push the weights of `model` (or its adapter) and check that they arrived. Raises EngineError.

        Rollouts that another thread is generating go on with the new weights. What the ranks of a divided model do
        together, its forward pass and putting the weights together, is done to the end also where the engine fails.
        """
        expected = tuple(trainer_logps(self.loaded, model, self.ids))
        offered = weights.offered(model, merged=self.loaded.is_lora)
        with torch.no_grad(), offered as whole, self.gate.syncing(self.pause):
            self.push(model, version, whole)
            self._check(expected, version)
        self.version = version

    def _check(self, expected: tuple[float, ...], version: int) -> None:
        """Every copy of the weights says of the sequence what the trainer says."""
        tolerance = logp_tolerance(self.dtype, other_kernels=True)
        hint = "rollout.engine: transformers samples with the trainer's own weights"
        found = [Seen(tuple(of_copy), expected) for of_copy in self.logps()]
        self.gap = max(mean_gap(seen.engine, seen.trainer) for seen in found)
        if not self.gap <= tolerance:
            raise EngineError(
                f"stale engine: after syncing version {version} its log-probs are {self.gap:.3g} nats"
                " from the trainer's",
                allowed=f"at most {tolerance} on average over {len(self.ids) - 1} tokens",
                hint=hint,
            )
        if any(before.missed(now, tolerance) for before, now in zip(self.seen, found, strict=False)):
            raise EngineError(
                f"stale engine: after syncing version {version} it still has the weights of an earlier one",
                allowed="its log-probs stayed where they were, and the trainer's have moved",
                hint=hint,
            )
        changed = [not self.seen or now.engine != self.seen[n].engine for n, now in enumerate(found)]
        self.seen = [now if new else self.seen[n] for n, (now, new) in enumerate(zip(found, changed, strict=True))]

    def probe(self, model: Any) -> float:
        """See `Engine.probe`; of several copies, the one that is farthest off."""
        expected = trainer_logps(self.loaded, model, self.ids)
        return max(mean_gap(of_copy, expected) for of_copy in self.logps())


def window_of(section: Vllm, loaded: LoadedModel, max_len: int) -> int:
    """The engine's max_model_len. Raises RecipeError if the recipe's, or the model's own, is too short."""
    limit = loaded.window
    window = section.max_model_len or max_len
    if window < max_len:
        raise RecipeError(
            f"rollout.vllm.max_model_len is {window}, but the longest prompt and max_new_tokens need {max_len} tokens",
            hint="leave it out to take what the data need, or set data.max_length",
        )
    if limit is not None and window > limit:
        raise RecipeError(f"a window of {window} tokens is more than the model's own, {limit}")
    return window


def engine_dtype(loaded: LoadedModel) -> torch.dtype:
    """What the trainer computes its forward pass in: the autocast type if there is one, else the weights'."""
    with loaded.autocast():
        return compute_dtype(loaded.device, loaded.model.dtype)


def adapter_rank(loaded: LoadedModel) -> int | None:
    """The largest rank of the trained adapter; None without one."""
    if not loaded.is_lora:
        return None
    config = loaded.model.peft_config["default"]
    return max([config.r, *config.rank_pattern.values()])
