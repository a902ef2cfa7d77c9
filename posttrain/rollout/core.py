"""vLLM without a trainer: requests in, completions out, weights by name. It runs in any process that has a GPU."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from posttrain.errors import EngineError, PosttrainError
from posttrain.models.host_memory import in_pieces
from posttrain.recipe.rollout_sections import Sampling, Vllm
from posttrain.rollout import compile_cache, rank, vllm_start, weights
from posttrain.rollout.engine import Completion
from posttrain.rollout.pushed import Done, Request
from posttrain.rollout.worker import repack


class VllmCore:
    """vLLM 0.22 to 0.32 on the model in `folder`, with random weights until the first `load`; with `lora_rank`, on the
    weights in the folder and an adapter on top. holds_base: the folder's weights are kept in the host's memory, so that
    an adapter to be added to them is all that has to come (`load_factors`).

    Log-probs include the temperature. On a small model they cost vLLM half as much time again as the tokens: ask for
    those that are read.
    """

    def __init__(
        self,
        section: Vllm,
        folder: Path,
        *,
        dtype: torch.dtype,
        window: int,
        lora_rank: int | None,
        eos_ids: Iterable[int],
        holds_base: bool = False,
    ) -> None:
        vllm_start.require_vllm()
        self.section = section
        self.base = read_base(folder, pinned=self.adds_on_gpu) if holds_base else {}
        self.eos_ids = sorted(eos_ids)
        self.asleep = False
        self.pausing = threading.Event()
        self.empty = False  # slept without keeping weights, and given none since
        self.lora = lora_rank is not None
        self.adapter: Any = None  # vLLM's LoRARequest of the newest version
        self.had_process_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.llm: Any = start_here(
            vllm_start.EngineSpec(section, dtype, window, lora_rank, tuple(self.eos_ids)), folder
        )
        self.per_request_seeds = bool(getattr(self.llm.llm_engine.vllm_config, "use_v2_model_runner", False))

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_available()

    @property
    def adds_on_gpu(self) -> bool:
        """Whether this process has the GPU, so that it can add there; under tensor parallelism others have theirs."""
        return self.on_gpu and self.section.tensor_parallel == 1

    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, done: Done | None = None
    ) -> list[list[Completion]]:
        """The samples of each request, in order; `done` hears of each as soon as it is finished, or paused."""
        self.pausing.clear()
        if self.empty:
            raise EngineError("vLLM slept without its weights: sync before it generates")
        self.wake()
        greedy = sampling.temperature == 0  # all samples of a prompt are equal, and vLLM takes n = 1 only
        params = [self._params(sampling, r, 1 if greedy else r.n) for r in requests]
        # What an earlier call left in the cache would change how requests are scheduled, and so what they draw.
        self.llm.reset_prefix_cache()

        def completions(place: int, output: Any) -> list[Completion]:
            request = requests[place]
            found = [completion(c, request.logprobs, paused=self.pausing.is_set()) for c in output.outputs]
            return found * request.n if greedy else found

        def heard(place: int, output: Any) -> None:
            if done is not None:
                done(place, completions(place, output))

        first = requests[0].number if requests else 0  # so that no two shares draw alike
        if self.section.tensor_parallel > 1:
            self.llm.collective_rpc("posttrain_seed", args=((seed + first) % 2**63,))
        with seeded(seed + first), self._listening(heard, len(requests)):
            outputs = self.run([r.ids for r in requests], params)
        return [completions(place, output) for place, output in enumerate(outputs)]

    def _params(self, sampling: Sampling, request: Request, n: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=request.max_new_tokens,
            seed=request.seed % 2**31 if self.per_request_seeds else None,
            stop=list(sampling.stop) or None,
            stop_token_ids=self.eos_ids if request.ends else None,
            include_stop_str_in_output=True,
            ignore_eos=True,  # the EOS set above is the only one
            detokenize=bool(sampling.stop),  # texts are decoded by us, from the ids
            skip_special_tokens=False,
            logprobs=0 if request.logprobs else None,  # 0 = of the sampled token alone
            flat_logprobs=True,
        )

    def pause(self) -> None:
        """Have `complete`, in another thread, return what there is. It may have returned already."""
        self.pausing.set()

    @contextlib.contextmanager
    def _listening(self, heard: Any, count: int) -> Iterator[None]:
        """Tell of each of `count` requests that vLLM finishes inside, by its place in the call: `generate` gives all at
        the end. When a pause is asked for, vLLM gives up the others behind its step.

        vLLM numbers the requests of its life. A version that numbers otherwise tells nothing early.
        """
        engine = self.llm.llm_engine
        first = getattr(getattr(self.llm, "request_counter", None), "counter", None)
        step = engine.step

        def listening() -> Any:
            outputs = step()
            if self.pausing.is_set():
                outputs = [*outputs, *given_up(engine)]
            for output in outputs:
                if first is not None and output.finished and output.request_id.isdecimal():
                    place = int(output.request_id) - first
                    if 0 <= place < count:
                        heard(place, output)
            return outputs

        engine.step = listening
        try:
            yield
        finally:
            del engine.step  # the class's own again

    def run(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        """vLLM's own `generate` on token ids."""
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        try:
            return self.llm.generate(requests, params, use_tqdm=False, lora_request=self.adapter)
        except Exception as cause:
            raise vllm_start.explain(cause, self.section, "failed while generating") from cause

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights, by checkpoint name. They are read as they come."""
        self.wake()
        if self.section.tensor_parallel > 1:
            rank.load(self.llm.collective_rpc, named)
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            if not self.on_gpu:
                self.llm.apply_model(repack)
        self.empty = False
        self.llm.reset_prefix_cache()

    def load_factors(self, factors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the base that is held here with an adapter added: see `weights.factors`."""
        device = torch.device("cuda" if self.adds_on_gpu else "cpu")
        self.load(weights.with_factors(self.base.items(), dict(factors), device))

    def load_adapter(self, folder: Path, version: int) -> None:
        """Use the adapter in `folder` from now on. It has a new id every time: vLLM takes a known id for a known
        adapter."""
        from vllm.lora.request import LoRARequest

        self.wake()
        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        self.adapter = LoRARequest(f"version-{version}", number, str(folder))
        self.llm.llm_engine.add_lora(self.adapter)
        self.llm.reset_prefix_cache()

    def logps(self, ids: Sequence[int]) -> list[float]:
        """log p(ids[t] | ids[:t]) for t = 1 ... len(ids)-1, at temperature 1."""
        from vllm import SamplingParams

        self.wake()
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )  # greedy draws nothing
        reported = self.run([ids], params)[0].prompt_logprobs
        return [entry[token].logprob for entry, token in zip(reported[1:], ids[1:], strict=True)]

    def sleep(self) -> None:
        """With vllm.sleep: give weights and cache memory back until `wake`. Else nothing.

        Full training drops the weights, since a sync brings new ones; LoRA keeps the base in host memory.
        """
        if self.section.sleep and not self.asleep:
            self.llm.sleep(level=1 if self.lora else 2)
            self.asleep = True
            self.empty = not self.lora

    def wake(self) -> None:
        """Take the memory back. Full training must load weights before it completes requests."""
        if self.asleep:
            torch.cuda.empty_cache()  # what the trainer's allocator holds but does not use
            self.llm.wake_up()
            self.asleep = False

    def close(self) -> None:
        """Free the memory. Calling it twice is fine."""
        if self.llm is None:
            return
        with contextlib.suppress(Exception):  # no room, say
            self.wake()  # asleep, vLLM would give back once more what it has given back
        llm, self.llm, self.adapter = self.llm, None, None
        llm.llm_engine.engine_core.shutdown()
        del llm  # what vLLM still holds goes when garbage is collected: its objects know each other
        leave_process_groups(everything=not self.had_process_group)


def start_here(spec: vllm_start.EngineSpec, folder: Path) -> Any:
    """A vllm.LLM in this process."""
    section = spec.section
    vllm_start.check_settings(section)
    vllm_start.prepare_environment()
    vllm_start.quiet()
    threads = torch.get_num_threads(), torch.set_num_threads
    try:
        vllm_start.check_heads(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))
        with compile_cache.apart():
            from vllm import LLM, envs

            with undisturbed_randomness(), compile_cache.same_path(folder, Path(envs.VLLM_CACHE_ROOT), 0) as path:
                return LLM(**arguments_here(spec, path))
    except PosttrainError:
        raise
    except Exception as cause:
        raise vllm_start.explain(cause, section, "did not start") from cause
    finally:
        # The CPU worker replaces torch.set_num_threads by a function that refuses.
        torch.set_num_threads = threads[1]
        torch.set_num_threads(threads[0])


def arguments_here(spec: vllm_start.EngineSpec, folder: Path) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    values = vllm_start.arguments(spec, folder)
    for name in ("weight_transfer_config", "worker_extension_cls", "distributed_executor_backend"):
        values.pop(name, None)
    if (size := spec.section.tensor_parallel) > 1:
        executor = {"distributed_executor_backend": "mp", "worker_extension_cls": rank.EXTENSION}
        return values | {"tensor_parallel_size": size, **executor}
    return values


@contextlib.contextmanager
def undisturbed_randomness() -> Iterator[None]:
    """Global random states afterwards are what they were before: vLLM seeds all of them when it starts."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def read_base(folder: Path, *, pinned: bool = False) -> dict[str, Tensor]:
    """The weights in a model folder, by name, in memory of this process. pinned: from where a GPU copies fast."""
    base: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        base |= load_file(path)  # mapped: the files may be removed once they are copied
    return dict(zip(base, in_pieces(base.values(), pinned=pinned), strict=True))


def given_up(engine: Any) -> list[Any]:
    """Abort what is under way in vLLM's LLMEngine; its outputs, with all that was sampled, as of finished requests."""
    from vllm.v1.engine import FinishReason

    processor = engine.output_processor
    states = dict(processor.request_states)
    made = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states.values()]
    engine.abort_request([*states, *processor.parent_requests], internal=True)
    return [output for output in made if output is not None]  # of n samples, the last one brings them all


def completion(output: Any, logprobs: bool, *, paused: bool = False) -> Completion:
    """vLLM's CompletionOutput as ours. paused: an aborted request is one that goes on later. Raises EngineError for
    another end than stop or length."""
    finish: Any = "paused" if paused and output.finish_reason == "abort" else output.finish_reason
    if finish not in ("stop", "length", "paused"):
        raise EngineError(f"vLLM gave up a request: finish reason {output.finish_reason}")
    logps = None
    if logprobs:
        flat = output.logprobs
        logps = tuple(flat.logprobs[i] for i in flat.start_indices)
    return Completion(tuple(output.token_ids), logps, finish)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators that vLLM's sampler draws from, and put them back as they were afterwards.

    A seed on every request would do the same, but then vLLM's older runner draws row by row: some 6 microseconds a row
    and token.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def leave_process_groups(*, everything: bool) -> None:
    """End vLLM's process groups (`everything`: the default one too, if vLLM made it) and return cached memory."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    if everything:
        destroy_distributed_environment()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
