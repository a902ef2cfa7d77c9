"""The transformers engine: samples with the trainer's own model object, so weights are not copied.

Where they are divided among ranks it has a copy of its own: ranks decode different prompts, and no two as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models.adapters import causal_of
from posttrain.models.precision import compute_dtype
from posttrain.models.rounding_bounds import logp_tolerance
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.decode import StopStrings, cache_gap, decode, uniforms
from posttrain.rollout.engine import Completion, StatelessEngine, as_rollouts, check_fits
from posttrain.rollout.weights import dense_weights, weight_stream

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

UNBOUNDED = 1 << 30


class TransformersEngine(StatelessEngine):
    """An Engine on the model that is trained: `sync` only counts; `probe` is 0 by construction.

    Given a copy of a model that is divided among ranks: `sync` copies its weights, all ranks together.
    """

    def __init__(self, loaded: LoadedModel, *, batch_size: int) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.eos_ids = loaded.eos_ids
        self.pad_id = loaded.pad_id
        self.batch_size = batch_size
        self.checked = False  # that the model goes on from its cache
        self.window = loaded.window or UNBOUNDED

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
        """See `Engine.generate`. Prompts of like length are decoded together, at most `batch_size` rows at a time;
        `done` hears of them between two such batches."""
        check_fits(prompts, sampling, self.window, limits)
        most = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        rows = sorted(range(len(prompts) * n), key=lambda r: (len(prompts[r // n].ids), r))
        u = uniforms(len(rows), sampling.max_new_tokens, seed)
        if share is not None:
            chosen = set(share)
            rows = [row for row in rows if row // n in chosen]
        stops = StopStrings(sampling.stop, self.tokenizer) if sampling.stop else None
        found: dict[int, Completion] = {}
        made: dict[int, list[Rollout]] = {}
        with eval_mode(self.model), self.loaded.autocast():
            if rows and not self.checked:
                self._check_cache()
            for start in range(0, len(rows), self.batch_size):
                chunk = rows[start : start + self.batch_size]
                found.update(self._decode_rows(prompts, n, chunk, u[chunk], sampling, stops, most))
                whole = [p for p in dict.fromkeys(r // n for r in chunk) if all(p * n + i in found for i in range(n))]
                ordered = [found[p * n + i] for p in whole for i in range(n)]
                if not logprobs:
                    ordered = [Completion(c.ids, None, c.finish) for c in ordered]
                rollouts = as_rollouts(
                    prompts, n, ordered, self.tokenizer, first_group=first_group, version=self.version, share=whole
                )
                new = {p: rollouts[i * n : (i + 1) * n] for i, p in enumerate(whole)}
                made |= new
                if done is not None and len(found) < len(rows):
                    for finished in new.values():
                        done(finished)
        return [rollout for p in sorted(made) for rollout in made[p]]

    def _decode_rows(
        self,
        prompts: Sequence[Prompt],
        n: int,
        rows: Sequence[int],
        u: Tensor,
        sampling: Sampling,
        stops: StopStrings | None,
        limits: Sequence[int],
    ) -> dict[int, Completion]:
        """Completions of rows r, which continue prompts[r // n] with at most limits[r // n] tokens, and draw with u
        [rows, max_new_tokens]."""
        distinct = list(dict.fromkeys(r // n for r in rows))
        place = {p: i for i, p in enumerate(distinct)}
        completions = decode(
            self.model,
            [prompts[p].ids for p in distinct],
            [place[r // n] for r in rows],
            u,
            sampling,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            stops=stops,
            limits=[limits[r // n] for r in rows],
        )
        return dict(zip(rows, completions, strict=True))

    def _check_cache(self) -> None:
        """Raises EngineError for an architecture whose state is not in the cache that sampling hands on."""
        why = ""
        try:
            gap = cache_gap(self.model, self.pad_id)
            if not gap <= logp_tolerance(compute_dtype(self.loaded.device, self.model.dtype)):
                why = f"log-probs token by token are {gap:.3g} nats from those of a whole pass"
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            why = str(error).splitlines()[0]
        if why:
            name = type(causal_of(self.model)).__name__
            raise EngineError(
                f"the transformers engine cannot sample from {name}", allowed=why, hint="use `engine: vllm`"
            )
        self.checked = True

    def sync(self, model: Any, version: int) -> None:
        """Count a new version. Raises EngineError if `model` is another object than the one that generates."""
        if isinstance(causal_of(model), FSDPModule):
            self._copy_from(model)
        elif model is not self.model:
            raise EngineError("the transformers engine generates with the model it was made with; got another one")
        self.version = version

    def _copy_from(self, model: Any) -> None:
        """Take over the trained weights of a divided model; of an adapter alone, whose base is frozen in both."""
        with torch.no_grad():
            if model is not causal_of(model):
                trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
                for name, weight in self.model.named_parameters():
                    if name in trained:
                        weight.copy_(trained[name])
                return
            own = dict(dense_weights(self.model))
            with weight_stream(model, names="modules") as whole:
                for name, weight in whole:
                    own[name].copy_(weight)


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Evaluation mode (no dropout, no checkpointing) inside; every module's own mode again afterwards.

    4-bit layers stay in training mode, which changes nothing else about them: bitsandbytes repacks an evaluated one on
    some CPUs, and that rounds its scales to bfloat16 for good, so that sampler and trainer would differ.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module, _ in modes:
        if type(module).__module__.startswith("bitsandbytes."):
            module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
