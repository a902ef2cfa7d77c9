"""The vLLM engine, colocated: vLLM runs in this process, on the trainer's device, and is handed weights as tensors."""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError, RecipeError
from posttrain.recipe.sections import Sampling, Vllm
from posttrain.rollout import vllm_start, weights
from posttrain.rollout.engine import Completion, as_rollouts, check_fits
from posttrain.rollout.probe import TOLERANCE, mean_gap, probe_ids, trainer_logps

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

PROBE_LENGTH = 32


class VllmEngine:
    """An Engine on vLLM 0.22 to 0.32.

    Full training: vLLM starts with random weights and every sync streams all of them from the trainer's tensors. LoRA:
    vLLM loads the dense base once and every sync replaces the adapter, some megabytes. Either way the sync ends in a
    probe: one fixed sequence through both, and EngineError where the gap is more than rounding.

    Log-probs include the temperature. With top-p or top-k vLLM can only report those of the cut and renormalised
    distribution, which no log-prob of the trainer compares with: they are left out (None). On a small
    model log-probs cost vLLM half as much time again as the tokens: ask for those that are read.
    """

    def __init__(self, section: Vllm, loaded: LoadedModel, *, scratch: Path, max_len: int) -> None:
        vllm_start.require_vllm()
        self.loaded = loaded
        self.section = section
        self.window = window_of(section, loaded, max_len)
        self.version = 0
        self.gap = 0.0
        self.asleep = False
        self.empty = False  # slept without keeping weights, and not synced since
        self.adapter: Any = None  # vLLM's LoRARequest of the newest version
        self.adapter_folder: Path | None = None
        self.ids = probe_ids(loaded.tokenizer, min(PROBE_LENGTH, self.window - 1))
        self.dtype = engine_dtype(loaded)
        self.had_process_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.scratch = scratch
        folder = scratch / "engine-model"
        if loaded.is_lora:
            weights.write_base(loaded, folder, self.dtype)
        else:
            weights.write_config(loaded, folder)
        self.llm: Any = vllm_start.start(
            section, folder, dtype=self.dtype, max_len=self.window, lora_rank=adapter_rank(loaded)
        )
        self.per_request_seeds = bool(getattr(self.llm.llm_engine.vllm_config, "use_v2_model_runner", False))
        try:
            self.sync(loaded.model, 0)
        except BaseException:
            self.close()
            raise

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
    ) -> list[Rollout]:
        """See `Engine.generate`. One request a prompt, n samples each, so that its prompt is computed once."""
        check_fits(prompts, sampling, self.window)
        self.wake()
        cut = sampling.top_p < 1 or sampling.top_k > 0
        wanted = 0 if cut and sampling.temperature > 0 else len(prompts) if logprobs is True else int(logprobs)
        greedy = sampling.temperature == 0  # all samples of a prompt are equal, and vLLM takes n = 1 only
        numbers = range(len(prompts)) if share is None else share
        params = [self._params(sampling, 1 if greedy else n, seed + i * n, i < wanted) for i in numbers]
        # What an earlier call left in the cache would change how requests are scheduled, and so what they draw.
        self.llm.reset_prefix_cache()
        with seeded(seed + (numbers[0] if numbers else 0), self.loaded.device):  # no two shares draw alike
            outputs = self._run([prompts[i].ids for i in numbers], params)
        completions = [
            completion(c, i < wanted)
            for i, o in zip(numbers, outputs, strict=True)
            for c in o.outputs
            for _ in range(n if greedy else 1)
        ]
        tokenizer = self.loaded.tokenizer
        return as_rollouts(
            prompts, n, completions, tokenizer, first_group=first_group, version=self.version, share=share
        )

    def _params(self, sampling: Sampling, n: int, seed: int, logprobs: bool) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            seed=seed % 2**31 if self.per_request_seeds else None,
            stop=list(sampling.stop) or None,
            stop_token_ids=sorted(self.loaded.eos_ids),
            include_stop_str_in_output=True,
            ignore_eos=True,  # the EOS set above is the only one
            detokenize=bool(sampling.stop),  # texts are decoded by us, from the ids
            skip_special_tokens=False,
            logprobs=0 if logprobs else None,  # 0 = of the sampled token alone
            flat_logprobs=True,
        )

    def _run(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        try:
            return self.llm.generate(requests, params, use_tqdm=False, lora_request=self.adapter)
        except Exception as cause:
            raise vllm_start.explain(cause, self.section, "failed while generating") from cause

    def sync(self, model: Any, version: int) -> None:
        """Push the weights of `model` (its adapter, with LoRA) and check that they arrived. Raises EngineError."""
        self.wake()
        model = getattr(model, "module", model)
        with torch.no_grad():
            if self.loaded.is_lora:
                self._push_adapter(model, version)
            else:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.dense_weights(model)})
                if self.loaded.device.type == "cpu":
                    self.llm.apply_model(repack_head)
        self.empty = False
        self.llm.reset_prefix_cache()
        self.gap = self.probe(model)
        if not self.gap <= TOLERANCE[self.dtype]:
            raise EngineError(
                f"stale engine: after syncing version {version} its log-probs are {self.gap:.3g} nats"
                " from the trainer's",
                allowed=f"at most {TOLERANCE[self.dtype]} on average over {len(self.ids) - 1} tokens",
                hint="rollout.engine: transformers samples with the trainer's own weights",
            )
        self.version = version

    def _push_adapter(self, model: Any, version: int) -> None:
        """A new adapter id for every version: vLLM takes a known id for a known adapter."""
        from vllm.lora.request import LoRARequest

        old = self.adapter_folder
        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        self.adapter_folder = weights.write_adapter(model, self.scratch / f"engine-adapter-{number}")
        self.adapter = LoRARequest(f"version-{version}", number, str(self.adapter_folder))
        self.llm.llm_engine.add_lora(self.adapter)
        if old is not None:
            shutil.rmtree(old)

    def probe(self, model: Any) -> float:
        """See `Engine.probe`."""
        return mean_gap(self._probe_logps(), trainer_logps(self.loaded, getattr(model, "module", model), self.ids))

    def _probe_logps(self) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )  # greedy draws nothing
        reported = self._run([self.ids], params)[0].prompt_logprobs
        return [entry[token].logprob for entry, token in zip(reported[1:], self.ids[1:], strict=True)]

    def sleep(self) -> None:
        """With vllm.sleep: give weights and cache memory back until `wake`. Else nothing.

        Full training drops the weights, since a sync brings new ones; LoRA keeps the base in host memory.
        """
        if self.section.sleep and not self.asleep:
            self.llm.sleep(level=1 if self.loaded.is_lora else 2)
            self.asleep = True
            self.empty = not self.loaded.is_lora

    def wake(self) -> None:
        """Take the memory back. `sync` and `generate` do it themselves; full training must sync before `generate`."""
        if self.asleep:
            torch.cuda.empty_cache()  # what the trainer's allocator holds but does not use
            self.llm.wake_up()
            self.asleep = False

    def close(self) -> None:
        """Free the engine's memory. Calling it twice is fine."""
        if self.llm is None:
            return
        core = self.llm.llm_engine.engine_core
        self.llm = self.adapter = None
        core.shutdown()
        if self.adapter_folder is not None:
            shutil.rmtree(self.adapter_folder, ignore_errors=True)
        leave_process_groups(everything=not self.had_process_group)


def completion(output: Any, logprobs: bool) -> Completion:
    """vLLM's CompletionOutput as ours. Raises EngineError for another end than stop or length (an aborted request)."""
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM gave up a request: finish reason {output.finish_reason}")
    logps = None
    if logprobs:
        flat = output.logprobs
        logps = tuple(flat.logprobs[i] for i in flat.start_indices)
    return Completion(tuple(output.token_ids), logps, output.finish_reason)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators that vLLM's sampler draws from, and put them back as they were afterwards.

    A seed on every request would do the same, but then vLLM's older runner draws row by row: some 6 microseconds a row
    and token.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def repack_head(model: Any) -> None:
    """Bring the output head of vLLM's model up to date on a CPU.

    There vLLM keeps a repacked copy of every matrix. A reload repacks what was loaded; a head that is tied to the
    embeddings is not loaded, so its copy would stay what it was at the start.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


def window_of(section: Vllm, loaded: LoadedModel, max_len: int) -> int:
    """The engine's max_model_len. Raises RecipeError if the recipe's, or the model's own, is too short."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
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
        if torch.is_autocast_enabled(loaded.device.type):
            return torch.get_autocast_dtype(loaded.device.type)
    return loaded.model.dtype


def adapter_rank(loaded: LoadedModel) -> int | None:
    """The largest rank of the trained adapter; None without one."""
    if not loaded.is_lora:
        return None
    config = loaded.model.peft_config["default"]
    return max([config.r, *config.rank_pattern.values()])


def leave_process_groups(*, everything: bool) -> None:
    """End vLLM's process groups (`everything`: the default one too, if vLLM made it) and return cached memory."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    if everything:
        destroy_distributed_environment()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
