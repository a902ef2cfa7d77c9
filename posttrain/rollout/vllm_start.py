"""Starting vLLM inside this process: environment, arguments, and start-up failures as sentences."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from posttrain.errors import EngineError, MissingExtra, PosttrainError, RecipeError, counted
from posttrain.recipe.rollout_sections import LORA_RANKS, Vllm
from posttrain.rollout import compile_cache, rank


def require_vllm() -> None:
    """Raise MissingExtra if vLLM cannot be found. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "rollout.engine: vllm", "vllm")


def prepare_environment() -> None:
    """Settings that vLLM reads from the environment. Those that the user made stay, but for the first."""
    # The engine core must live in this process: weights are handed over as tensors, not through a file or a pipe.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about its own choices
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is data
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of a process with threads may hang
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer shares these threads
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; without it vLLM takes a share of the host's memory
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def quiet() -> None:
    """Hold vLLM to VLLM_LOGGING_LEVEL from its first import on, when its logging is not set up yet, and leave out
    Python's warnings about its own code."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def start(section: Vllm, folder: Path, *, dtype: torch.dtype, max_len: int, lora_rank: int | None) -> Any:
    """A vllm.LLM on the model in `folder`. lora_rank None: weights are left random, to be pushed by the first sync.

    Raises RecipeError or EngineError with what to change.
    """
    require_vllm()
    check_settings(section)
    prepare_environment()
    quiet()
    threads = torch.get_num_threads(), torch.set_num_threads
    try:
        check_heads(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))
        with compile_cache.apart():
            from vllm import LLM, envs

            cache, process = Path(envs.VLLM_CACHE_ROOT), int(os.environ.get("RANK", "0"))
            with undisturbed_randomness(), compile_cache.same_path(folder, cache, process) as path:
                return LLM(**arguments(section, path, dtype=dtype, max_len=max_len, lora_rank=lora_rank))
    except PosttrainError:
        raise
    except Exception as cause:
        raise explain(cause, section, "did not start") from cause
    finally:
        # The CPU worker replaces torch.set_num_threads by a function that refuses; the trainer needs the real one.
        torch.set_num_threads = threads[1]
        torch.set_num_threads(threads[0])


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


def check_settings(section: Vllm) -> None:
    """Refuse what this machine cannot do, before the seconds that a start takes."""
    if section.sleep and not torch.cuda.is_available():
        raise RecipeError(
            "rollout.vllm.sleep needs a GPU", hint="leave it out: on a CPU there is no memory to hand over"
        )
    if torch.cuda.is_available() and (count := torch.cuda.device_count()) < section.tensor_parallel:
        raise RecipeError(
            f"rollout.vllm.tensor_parallel is {section.tensor_parallel}, but the server sees {counted(count, 'GPU')}",
            hint="`posttrain serve` takes those in its CUDA_VISIBLE_DEVICES",
        )


def check_divisible(config: Any, size: int) -> None:
    """Refuse a model whose attention `size` GPUs cannot divide. config: of transformers.

    KV heads may be fewer than the GPUs: vLLM then gives several GPUs the same one.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and max(kv_heads, n) % min(kv_heads, n) == 0]
    if size not in fitting:
        raise RecipeError(
            f"rollout.vllm.tensor_parallel: {size} GPUs cannot divide the model's {heads} attention heads and"
            f" {kv_heads} KV heads",
            allowed=f"for this model: {', '.join(map(str, fitting))}",
        )


def check_heads(read_config: Callable[[], Any]) -> None:
    """Refuse a model whose heads vLLM has no attention kernel for on this CPU: it would say so when it generates.

    read_config: gives that of transformers. vLLM is asked, which imports it: seconds, that its start needs anyhow. A
    vLLM that does not say, and attention of another kind (MLA), are left to it, and so is a GPU, where it chooses
    between backends.
    """
    if torch.cuda.is_available():
        return
    text = read_config().get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads or getattr(text, "kv_lora_rank", None):
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = cpu_head_sizes()
    if sizes and size not in sizes:
        raise RecipeError(
            f"vLLM has no attention kernel for this model's head size on a CPU: {size}",
            allowed=f"it has some for {', '.join(map(str, sizes))}",
            hint="use rollout.engine: transformers",
        )


def cpu_head_sizes() -> list[int]:
    """The head sizes that the installed vLLM has attention kernels for on a CPU; none where it does not say."""
    prepare_environment()
    quiet()
    try:
        with compile_cache.apart():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return sorted(CPUAttentionBackend.get_supported_head_sizes())
    except (ImportError, AttributeError):
        return []


def arguments(
    section: Vllm, folder: Path, *, dtype: torch.dtype, max_len: int, lora_rank: int | None
) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    values: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_len,
        "gpu_memory_utilization": section.share,
        "enforce_eager": section.enforce_eager,
        "enable_prefix_caching": True,
        "enable_sleep_mode": section.sleep,
        "logprobs_mode": "processed_logprobs",  # after temperature and cuts: `pushed.requests_of`
        "generation_config": "vllm",  # no sampling defaults from the model's folder: the recipe says it all
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        values["distributed_executor_backend"] = "external_launcher"  # an engine a trainer process, in its group
    if section.tensor_parallel > 1:
        values |= {
            "tensor_parallel_size": section.tensor_parallel,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": rank.EXTENSION,
        }
    if lora_rank is None:
        values["load_format"] = "dummy"
    else:
        values |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_slot(lora_rank)}
    return values


def lora_slot(rank: int) -> int:
    """The smallest adapter rank that vLLM can be started with and that holds `rank`. Raises RecipeError."""
    for slot in LORA_RANKS:
        if rank <= slot:
            return slot
    raise RecipeError(f"model.lora.rank {rank} is more than vLLM serves", allowed=f"at most {LORA_RANKS[-1]}")


def explain(cause: Exception, section: Vllm, what: str) -> EngineError:
    """What vLLM's exception means for the recipe."""
    text = "; ".join(e["msg"] for e in cause.errors()) if isinstance(cause, ValidationError) else str(cause)
    first = text.strip().splitlines()[0] if text.strip() else type(cause).__name__
    hint = "VLLM_LOGGING_LEVEL=INFO shows vLLM's own messages; rollout.engine: transformers works without it"
    if "head_dim" in text or "head size" in text.lower():
        hint = "vLLM has no attention kernel for this model's head size here; use rollout.engine: transformers"
    elif "CompileError" in text:
        hint = (
            "rollout.vllm.enforce_eager: true starts without compiling; on a CPU the path of vLLM's cache must have no"
            " space: VLLM_CACHE_ROOT, by default in the home directory"
        )
    elif isinstance(cause, torch.OutOfMemoryError) or "memory" in text.lower() or "cache blocks" in text.lower():
        hint = memory_hint(section)
    return EngineError(f"vLLM {what}: {type(cause).__name__}: {first}", hint=hint)


def memory_hint(section: Vllm) -> str:
    """What decides about the engine's memory here. On a CPU that is not `gpu_memory`: `prepare_environment`."""
    less = "a lower max_new_tokens or vllm.max_model_len needs less"
    if torch.cuda.is_available():
        return (
            f"rollout.vllm.gpu_memory is {section.share}: raise it if vLLM says that its share is too small,"
            f" lower it if it says that less is free; {less}"
        )
    return (
        f"the environment's VLLM_CPU_KVCACHE_SPACE is {os.environ.get('VLLM_CPU_KVCACHE_SPACE', 2)} GiB of cache: raise"
        f" it if vLLM says that it is too small, lower it if it says that less is free; {less}"
    )
