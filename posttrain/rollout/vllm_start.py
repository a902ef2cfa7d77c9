"""Starting vLLM with its engine core in another process: environment, engine arguments, checks, and readable errors."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import re
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from posttrain import terminal
from posttrain.errors import EngineError, MissingExtra, PosttrainError, RecipeError, count_noun
from posttrain.garbage_collection import pause_collection
from posttrain.models import adapters
from posttrain.recipe.engine_sections import LORA_RANKS, Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import compile_cache, engine_log, engine_process, kv_size, warm_process
from posttrain.rollout.engine_group import devices_of, group_here
from posttrain.rollout.engine_process import prepare_environment
from posttrain.rollout.requests import Request
from posttrain.rollout.weight_transfer import LOCAL_BACKEND
from posttrain.scratch import Scratch

EXTENSION = "posttrain.rollout.worker.Extension"
EXECUTOR = "posttrain.rollout.executor.SeveralWorkers"
SCHEDULER = "posttrain.rollout.schedulers.ChunkedScheduler"
ASYNC_SCHEDULER = "posttrain.rollout.schedulers.ChunkedAsyncScheduler"
# Batch sizes for which vLLM captures CUDA graphs. A batch is padded to the next size, which hardly slows decoding:
# it is bound by memory and by the host. Fewer than vLLM's own 51, because each one costs time at every start.
GRAPH_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]
CPU_EXPERTS = 32  # block size in hidden units of vLLM's CPU kernel for experts
_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"  # hidden from vLLM's process, which has a store of its own
READY_FILE = "ready"  # in the model's folder, once the model may be loaded (`engine_process.wait_until_ready`)
SOCKETS = "VLLM_RPC_BASE_PATH"  # folder of the socket files that vLLM creates and does not remove
SOCKET_NAME = 36  # characters in the name of such a file
LONGEST_SOCKET = 107  # bytes that Linux allows for the path of a socket file
RESUME = "go on with the same command and --resume"
LOG_HINT = "VLLM_LOGGING_LEVEL=INFO shows vLLM's own messages; rollout.engine: transformers works without it"
_WORKER_DIED = re.compile(r"Worker proc (\S+) died unexpectedly(?: \(exit code: (-?\d+)\))?")
_starting = threading.Lock()  # vLLM measures free memory at its start and reads settings from the environment


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started with, besides the model's folder. Nothing in it depends on the trainer's weights."""

    section: Vllm
    dtype: torch.dtype
    window: int  # maximum length of prompt + completion in tokens
    lora_rank: int | None  # None: whole weights are sent; else adapters up to this rank are loaded
    eos_ids: tuple[int, ...]
    image_ids: tuple[int, ...] = ()  # image placeholder tokens, which are never sampled
    adapters: int = 1  # number of adapters loaded together


def require_vllm() -> None:
    """Raise MissingExtra if vLLM is not installed. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "rollout.engine: vllm", "vllm")


def limit_logging() -> None:
    """Apply VLLM_LOGGING_LEVEL to vLLM from its first import on, before vLLM configures its logging, and ignore
    Python's warnings about vLLM's own code."""
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()
    logging.getLogger("vllm").setLevel(level)
    if level == "ERROR":  # `death_error` reports an engine core that died, not a traceback of this process
        logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def start(spec: EngineSpec, folder: Path, log: Path, sockets: Path) -> list[Any]:
    """Start as many vLLM engines as the section asks for on the model in `folder`, from any thread, and return their
    AsyncLLMs. log: gets the output of their engine cores.

    Their processes load the model once `folder` has a READY_FILE; every other step of the start comes before. Without
    `lora_rank` the weights stay random until the first sync. sockets: folder of their socket files.
    `make_engine.check_engine` has checked the settings. Raises RecipeError or EngineError with what to change.
    """
    prepare_environment()
    limit_logging()
    log.unlink(missing_ok=True)
    kv_file: Path | None = None
    try:
        with _starting:
            with compile_cache.keep_compiler_settings(), pause_collection():
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.usage.usage_lib import UsageContext
                from vllm.v1.engine.async_llm import AsyncLLM

            many = UsageContext.LLM_CLASS  # offline limits; otherwise 128 concurrent requests and small prefills
            process = int(os.environ.get("RANK", "0"))
            cache = cache_folder()
            here = _environment_of_core(spec, log, sockets, folder / READY_FILE, cache)
            with compile_cache.stable_path(folder, cache, process) as path, here, warm_process.use():
                given, kv_file = arguments(spec, path), kv_size_file(spec, folder)
                if (size := kv_size.read(kv_file)) is not None:
                    given["kv_cache_memory_bytes"] = size
                configs = [AsyncEngineArgs(**given).create_engine_config(many) for _ in range(spec.section.engines)]
                make = functools.partial(AsyncLLM.from_vllm_config, usage_context=many, disable_log_stats=True)
                # without a stored cache size, each engine measures the memory that the engines before it have left
                llms = start_together(make, configs, side_by_side=size is not None or not torch.cuda.is_available())
                limit_logging()  # again: vLLM has configured its logging
            for config in configs:  # vLLM 0.23 loads the processor at the first image, when the link is gone
                config.model_config.model = str(folder)
            return llms
    except PosttrainError:
        raise
    except Exception as cause:
        if kv_file is not None:  # vLLM did not start with the stored size, or has none
            with contextlib.suppress(OSError):
                kv_file.unlink()
        raise error_of(cause, spec.section, "did not start", log) from cause


def start_together(make: Callable[[Any], Any], configs: list[Any], *, side_by_side: bool) -> list[Any]:
    """Call `make` for each config and return the results. If one call fails, shut the others down and raise its error.

    side_by_side: one thread per config; otherwise one after the other, up to the first failure.
    """
    made: list[Any] = []
    failures: list[BaseException] = []

    def start_one(config: Any) -> None:
        if not failures:
            try:
                made.append(make(config))
            except BaseException as error:
                failures.append(error)

    with ThreadPoolExecutor(len(configs) if side_by_side else 1, thread_name_prefix="engine-start") as pool:
        list(pool.map(start_one, configs))
    if failures:
        for llm in made:
            llm.shutdown()
        raise failures[0]
    return made


def cache_folder() -> Path:
    """Return vLLM's cache folder, which holds what it has compiled; a temporary folder if that one is not writable."""
    prepare_environment()
    limit_logging()
    with compile_cache.keep_compiler_settings(), pause_collection():
        from vllm import envs

    folder = Path(envs.VLLM_CACHE_ROOT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        terminal.note(
            f"{folder}  vLLM cannot write its cache there ({error.strerror}); VLLM_CACHE_ROOT sets another folder"
        )
        instead = Scratch("vllm-cache")
        atexit.register(instead.close)
        folder = instead.path
        os.environ["VLLM_CACHE_ROOT"] = str(folder)
    return folder


def starts_beside(spec: EngineSpec, folder: Path) -> bool:
    """Return whether an engine for the model in `folder` may start while the trainer allocates memory on its GPU,
    because the size of its KV cache is known and vLLM need not measure free memory. Never for an engine that sleeps,
    which may be meant for memory that the trainer needs as well."""
    return not spec.section.sleep and kv_size.read(kv_size_file(spec, folder)) is not None


def kv_size_file(spec: EngineSpec, folder: Path) -> Path | None:
    """Return the file that stores the KV cache's size of engines with this spec; None without a GPU, where vLLM
    measures nothing. folder: that of the model."""
    if not torch.cuda.is_available():
        return None
    return kv_size.file_for(arguments(spec, folder), folder, cache_folder())


def remember_kv_size(spec: EngineSpec, folder: Path, measured: Iterable[int | None]) -> None:
    """Store the smallest of the KV cache sizes in bytes that workers have measured; None: a worker measured nothing."""
    sizes = [size for size in measured if size is not None]
    file = kv_size_file(spec, folder) if sizes else None
    if file is not None:
        kv_size.write(file, min(sizes))


@contextlib.contextmanager
def _environment_of_core(spec: EngineSpec, log: Path, sockets: Path, ready: Path, cache: Path) -> Iterator[None]:
    """Set the environment that only vLLM's processes get, for processes started inside the block."""
    ours = socket_settings(sockets) | compile_cache.kernel_cache(cache)
    ours |= {engine_process.READY: str(ready.absolute()), engine_process.PARENT: str(os.getpid())}
    if spec.section.tensor_parallel > 1 and torch.cuda.is_available():
        ours[engine_process.DEVICES] = ",".join(devices_of(group_here(spec.section.tensor_parallel)))
    if logging.getLogger("vllm").getEffectiveLevel() >= logging.ERROR:  # otherwise the user wants to see the output
        ours[engine_process.LOG] = str(log.absolute())
    with engine_process.restore_environment([_TORCHRUN, *ours]):
        os.environ.pop(_TORCHRUN, None)
        os.environ.update(ours)
        yield


def socket_settings(folder: Path) -> dict[str, str]:
    """Return the environment that makes vLLM create its socket files in `folder`; {} if the user has chosen a folder,
    or if the paths would be too long."""
    fits = len(os.fsencode(folder)) + 1 + SOCKET_NAME <= LONGEST_SOCKET
    return {SOCKETS: str(folder)} if fits and SOCKETS not in os.environ else {}


def check_settings(section: Vllm) -> None:
    """Check that this machine can do what the section asks for, before the seconds that a start takes. Raises
    RecipeError."""
    if section.sleep and not torch.cuda.is_available():
        raise RecipeError(
            "rollout.vllm.sleep needs a GPU", hint="leave it out: on a CPU there is no memory to hand over"
        )
    served = section.server is not None and torch.cuda.is_available()
    if served and (count := torch.cuda.device_count()) < section.tensor_parallel:
        raise RecipeError(
            f"rollout.vllm.tensor_parallel is {section.tensor_parallel}, but the server sees"
            f" {count_noun(count, 'GPU')}",
            hint="`posttrain serve --devices` names them",
        )


def check_divisible(config: Any, size: int) -> None:
    """Raise RecipeError if `size` GPUs cannot divide the model's attention heads. config: transformers configuration.

    There may be fewer KV heads than GPUs: vLLM then gives several GPUs the same head.
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


def check_adapter(base: Any) -> None:
    """Raise RecipeError if vLLM cannot apply an adapter beside the base weights. base: the model under PEFT's.

    For adapters on experts, PEFT has one tensor for all experts and vLLM three per expert. On a CPU, vLLM has no kernel
    for adapters in a model with experts, wherever the adapters are.
    """
    hint = "set `rollout.vllm.merge_adapter: true`: vLLM then gets merged weights"
    if adapters.adapts_experts(base):
        hint += "; or name `model.lora.targets` without experts and router, e.g. [q_proj, k_proj, v_proj, o_proj]"
        raise RecipeError("vLLM cannot load an adapter on experts separately from their weights", hint=hint)
    if not torch.cuda.is_available() and getattr(base.config.get_text_config(), "num_experts_per_tok", None):
        raise RecipeError(
            "on a CPU, vLLM cannot load an adapter separately from the weights of a model with experts", hint=hint
        )


def check_experts(config: Any) -> None:
    """Raise RecipeError for experts on a CPU that vLLM could load only once: it pads their weights to a multiple of its
    kernel's block size."""
    text = config.get_text_config()
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    if torch.cuda.is_available() or not getattr(text, "num_experts_per_tok", None) or not isinstance(width, int):
        return
    if width % CPU_EXPERTS:
        raise RecipeError(
            f"vLLM on a CPU cannot update the weights of experts with {width} hidden units",
            allowed=f"multiples of {CPU_EXPERTS}",
            hint="use rollout.engine: transformers",
        )


def check_heads(read_config: Callable[[], Any]) -> None:
    """Raise RecipeError if vLLM has no attention kernel on this CPU for the model's head size; vLLM itself reports this
    only when it generates.

    read_config: returns the transformers configuration. The supported sizes are read from vLLM, which imports it:
    seconds that its start needs anyway. Not checked: a vLLM that does not list its sizes, other kinds of attention
    (MLA), and a GPU, where vLLM chooses between backends.
    """
    if torch.cuda.is_available():
        return
    config = read_config()
    check_experts(config)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads or getattr(text, "kv_lora_rank", None):
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = cpu_head_sizes()
    if sizes and size not in sizes:
        raise RecipeError(
            f"vLLM has no attention kernel for this model's head size on a CPU: {size}",
            allowed=f"supported: {', '.join(map(str, sizes))}",
            hint="use rollout.engine: transformers",
        )


def cpu_head_sizes() -> list[int]:
    """Return the head sizes for which the installed vLLM has CPU attention kernels; an empty list if it does not list
    them."""
    prepare_environment()
    limit_logging()
    try:
        with compile_cache.keep_compiler_settings():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return sorted(CPUAttentionBackend.get_supported_head_sizes())
    except (ImportError, AttributeError):
        return []


def arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Return vLLM's engine arguments for an engine beside one or several training processes."""
    section = spec.section
    values: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.window,
        "gpu_memory_utilization": section.share,
        "enforce_eager": section.enforce_eager,
        "enable_prefix_caching": True,
        "enable_sleep_mode": section.sleep,
        "logprobs_mode": "processed_logprobs",  # after temperature and cuts (`requests.wanted_logprobs`)
        "generation_config": "vllm",  # no sampling defaults from the model's folder, only the recipe's
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "distributed_executor_backend": "uni",  # the model in the engine core's own process
        "worker_extension_cls": EXTENSION,
        "async_scheduling": torch.cuda.is_available(),  # as vLLM decides by itself; a CPU has no use for it
        "scheduler_cls": ASYNC_SCHEDULER if torch.cuda.is_available() else SCHEDULER,
        **({} if section.enforce_eager else {"cudagraph_capture_sizes": GRAPH_SIZES}),
    }
    if section.tensor_parallel > 1:
        values |= {"tensor_parallel_size": section.tensor_parallel, "distributed_executor_backend": EXECUTOR}
    if not torch.cuda.is_available():  # vLLM rewinds a half-read prompt's generator, which a CPU's cannot
        values["enable_chunked_prefill"] = False
    if spec.image_ids:
        from vllm.engine.arg_utils import AsyncEngineArgs

        if "mm_device_do_normalize" in AsyncEngineArgs.__dataclass_fields__:  # in 0.32
            values["mm_device_do_normalize"] = False  # random weights would overwrite the tower's mean and deviation
    if spec.lora_rank is None:
        return values | {"load_format": "dummy", "weight_transfer_config": {"backend": LOCAL_BACKEND}}
    return values | {"enable_lora": True, "max_loras": spec.adapters, "max_lora_rank": lora_slot(spec.lora_rank)}


def sampling_values(
    sampling: Sampling, request: Request, eos_ids: Iterable[int], forbidden: Iterable[int] = ()
) -> dict[str, Any]:
    """Return arguments of vLLM's SamplingParams for a request. vLLM answers once, when all samples of the request are
    finished. forbidden: tokens that are never sampled, such as image placeholders.

    Log-probs include the temperature. On a small model they cost vLLM half as much time again as the tokens, so request
    only those that are read.
    """
    return {
        "n": 1 if sampling.temperature == 0 else request.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": request.max_new_tokens,
        "seed": request.seed % 2**31,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": sorted(eos_ids) if request.ends else None,
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # only the EOS tokens above end a completion
        "detokenize": bool(sampling.stop),  # the trainer decodes the text from the ids
        "skip_special_tokens": False,
        "logprobs": 0 if request.logprobs else None,  # 0 = only that of the sampled token
        "flat_logprobs": True,
        **({"extra_args": {engine_process.IN_CHUNKS: True}} if request.in_chunks else {}),
        **({"logit_bias": dict.fromkeys(forbidden, -100.0)} if forbidden else {}),
    }


# SamplingParams that report the log-probs of the prompt. Greedy, so that no random number is drawn.
SCORING = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


def lora_slot(rank: int) -> int:
    """Return the smallest max_lora_rank that vLLM accepts and that is at least `rank`. Raises RecipeError if there is
    none."""
    for slot in LORA_RANKS:
        if rank <= slot:
            return slot
    raise RecipeError(f"model.lora.rank {rank} is more than vLLM serves", allowed=f"at most {LORA_RANKS[-1]}")


def error_of(cause: Exception, section: Vllm, what: str, log: Path) -> EngineError:
    """Return an EngineError for vLLM's exception, with a hint that fits the recipe. log: of the engine's processes; it
    is read if the exception and those that it was raised from only refer to an error there."""
    chain: list[BaseException] = [cause]
    while (below := chain[-1].__cause__) is not None:
        chain.append(below)
    messages = [describe_exception(error) for error in reversed(chain)]
    message = next((message for message in messages if not engine_log.refers_to_another(message)), "")
    if not message:
        text = engine_log.read_log(log)
        message = engine_log.root_cause(text)
        if not message and (lines := engine_log.last_lines(text)):
            return EngineError(f"vLLM {what}; the last lines of {log}:{lines}", hint=LOG_HINT)
    return error_with_hint(message or messages[-1], section, f"vLLM {what}")


def describe_exception(error: BaseException) -> str:
    """Return an exception as `Type: message`, with the first line of its message."""
    text = "; ".join(e["msg"] for e in error.errors()) if isinstance(error, ValidationError) else str(error)
    return ": ".join([type(error).__name__, *text.strip().splitlines()[:1]])


def error_with_hint(message: str, section: Vllm, what: str) -> EngineError:
    """Return an EngineError with the hint that fits vLLM's message. what: what has failed."""
    hint = LOG_HINT
    if "head_dim" in message or "head size" in message.lower():
        hint = "vLLM has no attention kernel for this model's head size here; use rollout.engine: transformers"
    elif "CompileError" in message:
        hint = (
            "rollout.vllm.enforce_eager: true starts without compiling; on a CPU the path of vLLM's cache must have no"
            " space: VLLM_CACHE_ROOT, by default in the home directory"
        )
    elif "No space left on device" in message:
        hint = "/dev/shm or the folder for temporary files is full; a container gets a larger /dev/shm by --shm-size"
    elif re.search(r"(?<!illegal )memory|cache blocks", message, re.IGNORECASE):
        hint = memory_hint(section)
    return EngineError(f"{what}: {message}", hint=hint)


def death_error(code: int | None, log: Path | None, section: Vllm, engine: str = "vLLM") -> EngineError:
    """Return the error for an engine's process that ended by itself, or because one of its workers did. code: its exit
    code. engine: its name in the message."""
    text, process = engine_log.read_log(log), engine
    if died := _WORKER_DIED.search(text):
        process, code = f"{engine}'s worker process {died[1]}", int(died[2]) if died[2] else None
        text = text[: died.start()]
    error = engine_log.root_cause(text)
    killed = "" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
    if killed or (died and code is None and not error):
        short = ": the system does this when memory runs out"
        what = f"{process} {killed or 'has ended'}{short if code in (None, -signal.SIGKILL) else ''}"
        return EngineError(what, hint=RESUME)
    if error:
        return error_with_hint(error, section, f"{engine} failed")
    lines = engine_log.last_lines(text)
    ends = f"; the last lines of {log}:{lines}" if lines else ""
    return EngineError(f"{process} ended with code {code}{ends}", hint=LOG_HINT)


def memory_hint(section: Vllm) -> str:
    """Return the hint about the engine's memory: `gpu_memory` on a GPU, on a CPU the cache size of
    `prepare_environment`."""
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
