"""The trainer's side of vLLM, wherever vLLM runs: seeds, policy versions, syncs and their probe, pauses, adapters.

vLLM never runs in the trainer's process. An `EngineClient` talks to each engine: `ColocatedClient` to one on the
trainer's GPU, `ServerClient` to `vllm serve` on other GPUs. docs/engine.md follows a token through all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.batch import Rollout
from posttrain.errors import EngineError, RecipeError
from posttrain.models import adapters, weights
from posttrain.models.rounding_bounds import logp_tolerance
from posttrain.recipe.engine_sections import Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop, vllm_start
from posttrain.rollout.colocated import ColocatedClient
from posttrain.rollout.engine import Completion, GenerationBatch, Generator
from posttrain.rollout.engine_client import (
    EngineClient,
    RequestFailed,
    ServerLost,
    close_all,
    raise_last,
    run_on_living,
)
from posttrain.rollout.probe import ProbeResult, mean_gap, probe_ids, trainer_logps
from posttrain.rollout.requests import Request, generate_concurrently
from posttrain.rollout.starting import StartingEngine
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.rollout.weight_transfer import LocalSender, WeightSender
from posttrain.seeds import derive

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

PROBE_LENGTH = 32
TrainerLogps = dict[str | None, tuple[float, ...]]  # adapter -> the trainer's log-probs of the probe sequence


def spec_of(section: Vllm, loaded: LoadedModel, max_len: int) -> EngineSpec:
    """Return what an engine for this model is started with. Raises RecipeError for a window that is too short, and for
    an adapter that vLLM cannot load."""
    for name in loaded.adapters:
        adapters.check_plain_lora(loaded.model.get_base_model(), name)
    rank = None if section.merge_adapter else adapter_rank(loaded)
    if rank is not None:
        vllm_start.check_adapter(loaded.model.get_base_model())
    image_ids = () if loaded.images is None else tuple(sorted(loaded.images.token_ids))
    window = window_of(section, loaded, max_len)
    eos_ids, count = tuple(sorted(loaded.eos_ids)), max(1, len(loaded.adapters))
    return EngineSpec(section, engine_dtype(loaded), window, rank, eos_ids, image_ids, adapters=count)


def begin_colocated(section: Vllm, loaded: LoadedModel, *, scratch: Path, max_len: int) -> StartingEngine:
    """Start vLLM beside the trainer, up to the point where it loads the model; `make_colocated` lets it continue.

    loaded: a skeleton without weights suffices (`models.load.build_skeleton`). An engine that needs neither the weights
    nor a measurement of the GPU's free memory continues on its own.
    """
    vllm_start.require_vllm()
    spec = spec_of(section, loaded, max_len)
    folder = weights.write_config(loaded, scratch / "engine-model")
    beside = vllm_start.starts_beside(spec, folder)
    if beside and spec.lora_rank is None:
        (folder / vllm_start.READY_FILE).touch()
    start = functools.partial(ColocatedClient.start, spec, folder, scratch / "engine.log")
    key = (spec, weights.published_config(loaded).to_json_string())
    # an engine that fails beside the trainer deletes its stored cache size, and measures at the next start
    finish = functools.partial(colocated_engine, loaded=loaded, scratch=scratch)
    return StartingEngine(start, finish, beside=beside, key=key, folder=folder)


def make_colocated(
    section: Vllm, loaded: LoadedModel, *, scratch: Path, max_len: int, begun: StartingEngine | None = None
) -> VllmEngine | StartingEngine:
    """Return a VllmEngine beside the trainer (`make_engine`). It may still be starting if it can start beside other
    work."""
    finish = functools.partial(colocated_engine, loaded=loaded, scratch=scratch)
    begun = continue_start(section, loaded, scratch=scratch, max_len=max_len, begun=begun, finish=finish)
    return begun if begun.beside else begun.engine_or_close()


def continue_start(
    section: Vllm,
    loaded: LoadedModel,
    *,
    scratch: Path,
    max_len: int,
    begun: StartingEngine | None,
    finish: Callable[[Any], Any],
) -> StartingEngine:
    """Let an engine that has begun to start load the model.

    begun: used if it was begun for the loaded model; otherwise another start is begun. finish: see `StartingEngine`.
    """
    spec = spec_of(section, loaded, max_len)
    if begun is not None and begun.key != (spec, weights.published_config(loaded).to_json_string()):
        begun.close()
        begun = None
    begun = begun or begin_colocated(section, loaded, scratch=scratch, max_len=max_len)
    folder = begun.folder
    assert folder is not None

    def finish_start(clients: Any) -> Any:
        for file in folder.glob("*.safetensors*"):  # vLLM has read them, and under LoRA they are as large as the model
            file.unlink()
        return finish(clients)

    begun.finish = finish_start
    try:
        if spec.lora_rank is not None:
            weights.write_base(loaded, folder, spec.dtype)
        (folder / vllm_start.READY_FILE).touch()
    except BaseException:
        begun.close()
        raise
    return begun


def colocated_engine(clients: Sequence[ColocatedClient], loaded: LoadedModel, *, scratch: Path) -> VllmEngine:
    """Return a VllmEngine on started clients, which are closed if this fails."""
    return VllmEngine(clients[0].spec, loaded, clients, scratch=scratch)


class VllmEngine(Generator):
    """A ConcurrentEngine on one or more vLLM engines that hold the same weights and share the requests.

    Full training: every sync sends all weights. LoRA: vLLM holds the dense base, and a sync replaces the adapters (a
    few megabytes); with `merge_adapter` the sums of base and adapter are sent like the weights of full training. Every
    sync ends with a probe: trainer and engine compute log-probs of one fixed sequence, with each adapter, and
    EngineError is raised if the gap is larger than rounding explains.
    """

    writes_files = True  # False: another process writes the adapters, and without a GPU the weights, of this engine

    def __init__(
        self, spec: EngineSpec, loaded: LoadedModel, clients: Sequence[EngineClient], *, scratch: Path
    ) -> None:
        """Takes ownership of the clients, and closes them if this fails; the weights of `loaded` become version 0."""
        self.spec, self.loaded, self.clients, self.scratch = spec, loaded, list(clients), scratch
        self.window, self.version, self.gap = spec.window, 0, 0.0
        # its processes have their own memory, so they can generate during an update, unless they sleep then
        self.generates_during_updates = not spec.section.sleep
        self.sender: WeightSender | None = None
        self.asleep = False
        self.empty = False  # weights were dropped by `sleep` and not sent since
        self.ids = probe_ids(loaded.tokenizer, min(PROBE_LENGTH, spec.window - 1))
        self.seen: dict[tuple[EngineClient, str | None], ProbeResult] = {}  # by engine and adapter
        self.written = 0  # adapters written so far
        self.turn = 0  # round-robin among equally busy engines
        self.busy = Counter[EngineClient]()  # samples in progress per engine
        self.repeated = 0  # requests repeated after an engine was lost
        self.open = asyncio.Event()  # belongs to the loop; clear while weights are replaced
        self.open.set()
        try:
            if spec.lora_rank is None:
                self.sender = self.make_sender()
            self.sync(loaded.model, 0)
        except BaseException:
            self.close()
            raise

    def make_sender(self) -> WeightSender:
        """Return what sends whole weights to the clients."""
        return LocalSender(self.clients, self.loaded.device, self.spec.dtype, writes=self.writes_files)

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Sample all prompts concurrently (`Engine.generate`)."""
        self.wake()
        return generate_concurrently(self, self.loaded.tokenizer, batch)

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Sample one request to its end (`ConcurrentEngine.complete`)."""
        if self.asleep or self.empty:
            raise EngineError(
                "vLLM has dropped its weights: call sync before generate"
                if self.empty
                else "vLLM is asleep: call wake before generate"
            )
        # A sync that interrupts a sample needs all its tokens: resampled ones would get a second chance to end it.
        request = dataclasses.replace(request, in_chunks=not (sampling.stop or sampling.interruptible))
        samples = await self._sample(request, sampling)
        return await asyncio.gather(
            *(self._finish_sample(request, place, c, sampling) for place, c in enumerate(samples))
        )

    async def _sample(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Sample the request at the least busy engine until it is done or paused, and tag the tokens with the engine's
        version. If the engine is lost, the request is repeated at another engine; once also if only this request fails.
        """
        failed: EngineClient | None = None
        while True:
            await self.open.wait()
            version, client = self.version, self._least_busy(failed)
            self.busy[client] += request.n
            try:
                found = await client.complete(request, sampling)
            except ServerLost:
                self.repeated += 1
                self.on_lost(client)
                continue
            except RequestFailed:
                if failed is not None:
                    raise
                self.repeated += 1
                failed = client
                continue
            finally:
                self.busy[client] -= request.n
            return [dataclasses.replace(c, versions=(version,) * len(c.ids)) for c in found]

    def _least_busy(self, failed: EngineClient | None = None) -> EngineClient:
        """Return the engine with the fewest samples in progress, round-robin among equals. Raises ServerLost if all are
        lost.

        failed: an engine to choose only if no other is left.
        """
        living = [client for client in self.clients if client.lost is None]
        if not living:
            raise_last(self.clients)
        living = [client for client in living if client is not failed] or living
        start = self.turn % len(living)
        self.turn += 1
        return min(living[start:] + living[:start], key=self.busy.__getitem__)

    def on_lost(self, client: EngineClient) -> None:
        """Hook that is called when a request has lost its engine."""

    async def _finish_sample(self, request: Request, place: int, sample: Completion, sampling: Sampling) -> Completion:
        """Continue a paused sample until it ends. The seed of each continuation is derived from the sample's place in
        the request and the number of pauses."""
        rounds = itertools.count(1)
        while sample.finish == "paused":
            rest = dataclasses.replace(
                request,
                ids=request.ids + sample.ids,
                n=1,
                seed=derive(request.seed + place, "continued", next(rounds)),
                max_new_tokens=request.max_new_tokens - len(sample.ids),
            )
            sample = concatenate(sample, (await self._sample(rest, sampling))[0])
        return sample

    def sync(self, model: Any, version: int) -> None:
        """Send the weights of `model` (or its adapters) to the engines, and check that they arrived. Raises
        EngineError.

        Rollouts in progress continue with the new weights. With a model divided among ranks, the collective parts (the
        forward pass, gathering the weights) are completed even if the engine fails.
        """
        expected = self._trainer_logps(model)
        offered: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(iter(()))
        if self.spec.lora_rank is None:
            offered = weights.weight_stream(model, merged=self.loaded.is_lora)
        with torch.no_grad(), offered as whole, self._pause_generation():
            self.wake()
            self.replace_weights(model, whole, version, expected)
            self.version = version

    def replace_weights(
        self, model: Any, whole: Iterator[tuple[str, torch.Tensor]], version: int, expected: TrainerLogps
    ) -> None:
        """Send the weights of `sync` to the paused engines, resume them and check them. whole: iterator over all
        weights; expected: the trainer's log-probs of the probe sequence."""
        if self.sender is None:
            self.push_adapters(model, version)
        else:
            self.sender.send(whole)
        self.empty = False
        run_on_living(self.clients, lambda client: client.resume())
        self._check(expected, version)

    @contextlib.contextmanager
    def _pause_generation(self) -> Iterator[None]:
        """Hold back new requests and interrupt running ones inside the block; they continue afterwards."""
        try:
            loop.call(self.open.clear)
            self.pause_engines()
            yield
        finally:  # also after an error: waiting requests then raise the engine's error
            loop.call(self.open.set)

    def pause_engines(self) -> None:
        """Interrupt running requests; no request reaches the engines meanwhile."""
        run_on_living(self.clients, lambda client: client.pause())

    def push_adapters(self, model: Any, version: int) -> None:
        """Write the trained adapters to disk and load them in the engines. Nothing else is sent over the disk."""
        folders: dict[str, Path] = {}
        try:
            for name in self.loaded.adapters if self.writes_files else ():
                self.written += 1
                folders[name] = self.scratch / f"engine-adapter-{self.written}"
                weights.write_adapter(model, folders[name], self.spec.dtype, name)
            run_on_living(self.clients, lambda client: client.load_adapters(folders, version))
        finally:
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)

    def _trainer_logps(self, model: Any) -> TrainerLogps:
        """Return the trainer's log-probs of the probe sequence, with each adapter."""
        names = self.loaded.adapters or (None,)
        return {name: tuple(trainer_logps(self.loaded, model, self.ids, name)) for name in names}

    def _engine_logps(self) -> dict[tuple[EngineClient, str | None], list[float]]:
        """Return each engine's log-probs of the probe sequence, with each adapter. One adapter at a time: vLLM's head
        mixes up prompt log-probs of two adapters in one batch."""
        found: dict[tuple[EngineClient, str | None], list[float]] = {}
        for name in self.loaded.adapters or (None,):
            scores = run_on_living(self.clients, methodcaller("score", self.ids, name))
            found |= {(client, name): logps for client, logps in scores.items()}
        return found

    def _check(self, expected: TrainerLogps, version: int) -> None:
        """Check that every engine's log-probs of the probe sequence match the trainer's and have changed with them.
        Raises EngineError."""
        tolerance = logp_tolerance(self.spec.dtype, other_kernels=True)
        hint = "rollout.engine: transformers samples with the trainer's own weights"
        found = {place: ProbeResult(tuple(logps), expected[place[1]]) for place, logps in self._engine_logps().items()}
        self.gap = max(mean_gap(seen.engine, seen.trainer) for seen in found.values())
        if not self.gap <= tolerance:
            raise EngineError(
                f"stale engine: after syncing version {version} its log-probs are {self.gap:.3g} nats"
                " from the trainer's",
                allowed=f"at most {tolerance} on average over {len(self.ids) - 1} tokens",
                hint=hint,
            )
        if any(self.seen[place].missed_sync(now, tolerance) for place, now in found.items() if place in self.seen):
            raise EngineError(
                f"stale engine: after syncing version {version} it still has the weights of an earlier one",
                allowed="its log-probs stayed where they were, and the trainer's have moved",
                hint=hint,
            )
        for place, now in found.items():
            if place not in self.seen or now.engine != self.seen[place].engine:
                self.seen[place] = now

    def probe(self, model: Any) -> float:
        """Return the gap between engine and trainer (`Engine.probe`): the largest one, over engines and adapters."""
        expected = self._trainer_logps(model)
        self.wake()
        return max(mean_gap(logps, expected[name]) for (_, name), logps in self._engine_logps().items())

    def sleep(self) -> None:
        """With vllm.sleep: free the memory of weights and cache until `wake`. Otherwise do nothing.

        Whole weights are dropped, since a sync sends new ones; under adapters the base stays in host memory.
        """
        if self.spec.section.sleep and not self.generates_during_updates and not self.asleep:
            keep = self.sender is None
            loop.run_all([client.sleep(keep_weights=keep) for client in self.clients])
            self.asleep, self.empty = True, not keep

    def wake(self) -> None:
        """Allocate the memory again. `sync` and `generate` call this themselves; dropped weights need a sync first."""
        if self.asleep:
            torch.cuda.empty_cache()  # memory that the trainer's allocator holds but does not use
            loop.run_all([client.wake() for client in self.clients])
            self.asleep = False

    def close(self) -> None:
        """End the engines and free their memory. May be called twice."""
        if self.sender is not None:
            self.sender.close()
        close_all(self.clients)


def concatenate(before: Completion, new: Completion) -> Completion:
    """Return `before` continued by `new`. Tokens, log-probs and versions stay as they were sampled."""
    logps = None if before.logps is None or new.logps is None else before.logps + new.logps
    versions = (before.versions or ()) + (new.versions or ())
    return Completion(before.ids + new.ids, logps, new.finish, versions)


def window_of(section: Vllm, loaded: LoadedModel, max_len: int) -> int:
    """Return the engine's max_model_len. Raises RecipeError if it is shorter than the run needs, or longer than the
    model's own window."""
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
    """Return the dtype of the trainer's forward pass: the autocast dtype if there is one, else that of the weights."""
    return loaded.half or loaded.model.dtype


def adapter_rank(loaded: LoadedModel) -> int | None:
    """Return the largest LoRA rank of the trained adapters, which all have one shape; None without adapters."""
    if not loaded.is_lora:
        return None
    config = loaded.model.peft_config[loaded.adapters[0]]
    return max([config.r, *config.rank_pattern.values()])
