"""Starting vLLM with its engine core in a process of its own: environment, arguments, and failures as sentences."""

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
from transformers import AutoConfig

from posttrain import terminal
from posttrain.errors import EngineError, MissingExtra, PosttrainError, RecipeError, count_noun
from posttrain.models import adapters
from posttrain.recipe.engine_sections import LORA_RANKS, Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import compile_cache, engine_process, kv_size, warm_process
from posttrain.rollout.engine_group import devices_of, group_here
from posttrain.rollout.engine_process import prepare_environment
from posttrain.rollout.requests import Request
from posttrain.rollout.weight_transfer import LOCAL_BACKEND
from posttrain.scratch import Scratch

EXTENSION = "posttrain.rollout.worker.Extension"
EXECUTOR = "posttrain.rollout.executor.SeveralWorkers"
# Batches for which vLLM captures CUDA graphs; others are filled up to the next one, which costs a decoding step little:
# it waits for memory and for the host. Fewer than vLLM's own 51, since each takes its time at every start.
GRAPH_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]
CPU_EXPERTS = 32  # hidden units of an expert that vLLM's kernel on a CPU takes at a time
_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"  # vLLM's process has a store of its own
READY_FILE = "ready"  # in the model's folder, once it may be loaded: see `engine_process.wait_until_ready`
SOCKETS = "VLLM_RPC_BASE_PATH"  # names the folder of the socket files that vLLM makes and does not remove
SOCKET_NAME = 36  # characters that vLLM calls one by
LONGEST_SOCKET = 107  # bytes of a socket file's path, as Linux has it
_ERROR = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception)): (.+)")
_WORKER_DIED = re.compile(r"Worker proc (\S+) died unexpectedly(?: \(exit code: (-?\d+)\))?")
_starting = threading.Lock()  # vLLM measures free memory when it starts, and gets its settings by the environment


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started with, besides the folder of its model. Nothing of it needs the trainer's weights."""

    section: Vllm
    dtype: torch.dtype
    window: int  # longest prompt + completion in tokens
    lora_rank: int | None  # None: whole weights are sent; else adapters up to this rank are loaded
    eos_ids: tuple[int, ...]
    image_ids: tuple[int, ...] = ()  # tokens in whose places the model puts images, which are never sampled
    adapters: int = 1  # that are loaded side by side


def require_vllm() -> None:
    """Raise MissingExtra if vLLM cannot be found. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "rollout.engine: vllm", "vllm")


def limit_logging() -> None:
    """Hold vLLM to VLLM_LOGGING_LEVEL from its first import on, when its logging is not set up yet, and leave out
    Python's warnings about its own code."""
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()
    logging.getLogger("vllm").setLevel(level)
    if level == "ERROR":  # an engine core that died is told by `death`, not by a traceback of the half that lives
        logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def start(spec: EngineSpec, folder: Path, log: Path, sockets: Path) -> list[Any]:
    """vLLM AsyncLLMs on the model in `folder`, as many as the section asks for, whose engine cores write what they say
    to `log`. From any thread.

    Their processes load the model once `folder` has a READY_FILE; all else of a start comes before. Without `lora_rank`
    weights are left random, to be sent by the first sync. sockets: the folder of their socket files.
    Raises RecipeError or EngineError with what to change.
    """
    require_vllm()
    check_settings(spec.section)
    prepare_environment()
    limit_logging()
    log.unlink(missing_ok=True)
    known = dict[str, int]()
    try:
        check_heads(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))
        with _starting:
            with compile_cache.keep_compiler_settings():
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.usage.usage_lib import UsageContext
                from vllm.v1.engine.async_llm import AsyncLLM

            many = UsageContext.LLM_CLASS  # as many requests at once as offline; else 128, and small prefills
            process = int(os.environ.get("RANK", "0"))
            cache = cache_folder()
            here = _environment_of_core(spec, log, sockets, folder / READY_FILE, cache)
            with compile_cache.stable_path(folder, cache, process) as path, here, warm_process.use():
                given = arguments(spec, path)
                known = kv_size.known_size(given, folder, cache)
                options = {"usage_context": many, "disable_log_stats": True}
                configs = [
                    AsyncEngineArgs(**given, **known).create_engine_config(many) for _ in range(spec.section.engines)
                ]
                make = functools.partial(AsyncLLM.from_vllm_config, **options)
                # without the size of its cache, each measures how much memory those before it have left
                llms = start_together(make, configs, side_by_side=bool(known) or not torch.cuda.is_available())
                limit_logging()  # again: vLLM has set its logging up
            for config in configs:  # vLLM 0.23 reads the processor with the first image, when the link has gone
                config.model_config.model = str(folder)
            return llms
    except PosttrainError:
        raise
    except Exception as cause:
        if known:
            kv_size.forget(arguments(spec, folder), folder, cache_folder())
        raise error_of(cause, spec.section, "did not start", log) from cause


def start_together(make: Callable[[Any], Any], configs: list[Any], *, side_by_side: bool) -> list[Any]:
    """What `make` makes of each config. Where one fails the others are shut down, and its error is raised.

    side_by_side: in a thread each; else one after the other, up to the first that fails.
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
    """vLLM's own, in which it keeps what it has compiled; a temporary one if that cannot be written."""
    prepare_environment()
    limit_logging()
    with compile_cache.keep_compiler_settings():  # the package alone is imported quickly
        from vllm import envs

    folder = Path(envs.VLLM_CACHE_ROOT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        terminal.note(f"{folder}  vLLM cannot keep what it compiles there ({error.strerror}); VLLM_CACHE_ROOT names it")
        instead = Scratch("vllm-cache")
        atexit.register(instead.close)
        folder = instead.path
        os.environ["VLLM_CACHE_ROOT"] = str(folder)
    return folder


def starts_beside(spec: EngineSpec, folder: Path) -> bool:
    """Whether an engine for the model in `folder` may start while the trainer allocates memory on its GPU: vLLM need
    not measure it. One that sleeps may be meant for memory that the trainer needs as well."""
    if spec.section.sleep or not torch.cuda.is_available():
        return False
    return bool(kv_size.known_size(arguments(spec, folder), folder, cache_folder()))


def remember_kv_size(spec: EngineSpec, folder: Path, size: int | None) -> None:
    """Keep what vLLM has measured for its KV cache, in bytes; None if it has not."""
    if size is not None and torch.cuda.is_available():
        kv_size.remember(arguments(spec, folder), folder, cache_folder(), size)


@contextlib.contextmanager
def _environment_of_core(spec: EngineSpec, log: Path, sockets: Path, ready: Path, cache: Path) -> Iterator[None]:
    """Inside, processes are started with what only vLLM's is to have."""
    ours = socket_settings(sockets) | compile_cache.kernel_cache(cache)
    ours |= {engine_process.READY: str(ready.absolute()), engine_process.PARENT: str(os.getpid())}
    if spec.section.tensor_parallel > 1 and torch.cuda.is_available():
        ours[engine_process.DEVICES] = ",".join(devices_of(group_here(spec.section.tensor_parallel)))
    before = {name: os.environ.pop(name, None) for name in (_TORCHRUN, *ours)}
    os.environ.update(ours)
    if logging.getLogger("vllm").getEffectiveLevel() >= logging.ERROR:  # else the user wants to see it
        os.environ[engine_process.LOG] = str(log.absolute())
    try:
        yield
    finally:
        os.environ.pop(engine_process.LOG, None)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def socket_settings(folder: Path) -> dict[str, str]:
    """What of the environment has vLLM put its socket files into `folder`; {} where the user has said where, or where
    their paths would be too long."""
    fits = len(os.fsencode(folder)) + 1 + SOCKET_NAME <= LONGEST_SOCKET
    return {SOCKETS: str(folder)} if fits and SOCKETS not in os.environ else {}


def check_settings(section: Vllm) -> None:
    """Refuse what this machine cannot do, before the seconds that a start takes."""
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


def check_adapter(base: Any) -> None:
    """Refuse an adapter beside the weights that vLLM would not compute with. base: the model under PEFT's.

    Adapters on experts are products of one tensor for all experts in PEFT, and three for each expert in vLLM. On a CPU
    vLLM has no kernel for adapters in a model with experts, wherever they are.
    """
    hint = "write `rollout.vllm.merge_adapter: true`: vLLM then gets the sums of base and adapter"
    if adapters.on_experts(base):
        hint += "; or name `model.lora.targets` without experts and router, e.g. [q_proj, k_proj, v_proj, o_proj]"
        raise RecipeError("vLLM does not load an adapter on experts beside their weights", hint=hint)
    if not torch.cuda.is_available() and getattr(base.config.get_text_config(), "num_experts_per_tok", None):
        raise RecipeError("on a CPU, vLLM loads no adapter beside the weights of a model with experts", hint=hint)


def check_experts(config: Any) -> None:
    """Refuse experts on a CPU whose weights vLLM could be given once alone: it pads them to its kernel's multiple."""
    text = config.get_text_config()
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    if torch.cuda.is_available() or not getattr(text, "num_experts_per_tok", None) or not isinstance(width, int):
        return
    if width % CPU_EXPERTS:
        raise RecipeError(
            f"vLLM on a CPU takes no new weights for experts of {width} hidden units",
            allowed=f"multiples of {CPU_EXPERTS}",
            hint="use rollout.engine: transformers",
        )


def check_heads(read_config: Callable[[], Any]) -> None:
    """Refuse a model whose heads vLLM has no attention kernel for on this CPU: it would say so when it generates.

    read_config: gives that of transformers. vLLM is asked, which imports it: seconds, that its start needs anyhow. A
    vLLM that does not say, and attention of another kind (MLA), are left to it, and so is a GPU, where it chooses
    between backends.
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
            allowed=f"it has some for {', '.join(map(str, sizes))}",
            hint="use rollout.engine: transformers",
        )


def cpu_head_sizes() -> list[int]:
    """The head sizes that the installed vLLM has attention kernels for on a CPU; none where it does not say."""
    prepare_environment()
    limit_logging()
    try:
        with compile_cache.keep_compiler_settings():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return sorted(CPUAttentionBackend.get_supported_head_sizes())
    except (ImportError, AttributeError):
        return []


def arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """vLLM's engine arguments, for an engine beside the trainer, or beside several of them."""
    section = spec.section
    values: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.window,
        "gpu_memory_utilization": section.share,
        "enforce_eager": section.enforce_eager,
        "enable_prefix_caching": True,
        "enable_sleep_mode": section.sleep,
        "logprobs_mode": "processed_logprobs",  # after temperature and cuts: `requests.requests_of`
        "generation_config": "vllm",  # no sampling defaults from the model's folder: the recipe says it all
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "distributed_executor_backend": "uni",  # the model in the engine core's own process
        "worker_extension_cls": EXTENSION,
        **({} if section.enforce_eager else {"cudagraph_capture_sizes": GRAPH_SIZES}),
    }
    if section.tensor_parallel > 1:
        values |= {"tensor_parallel_size": section.tensor_parallel, "distributed_executor_backend": EXECUTOR}
    if not torch.cuda.is_available():  # vLLM winds the seeded generator of a half-read prompt back, and a CPU's cannot
        values["enable_chunked_prefill"] = False
    if spec.image_ids and _can_normalise_in_tower():  # random starting weights would overwrite its mean and deviation
        values["mm_device_do_normalize"] = False
    if spec.lora_rank is None:
        return values | {"load_format": "dummy", "weight_transfer_config": {"backend": LOCAL_BACKEND}}
    return values | {"enable_lora": True, "max_loras": spec.adapters, "max_lora_rank": lora_slot(spec.lora_rank)}


def _can_normalise_in_tower() -> bool:
    """Whether this vLLM may leave the normalisation of pixels to the vision tower (0.32 does)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return "mm_device_do_normalize" in AsyncEngineArgs.__dataclass_fields__


def sampling_values(
    sampling: Sampling, request: Request, eos_ids: Iterable[int], forbidden: Iterable[int] = ()
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for a request. vLLM tells of it once, when all its samples are finished.
    forbidden: tokens that are not sampled, as those in whose places a model puts images.

    Log-probs include the temperature. On a small model they cost vLLM half as much time again as the tokens: ask for
    those that are read.
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
        "ignore_eos": True,  # the EOS set above is the only one
        "detokenize": bool(sampling.stop),  # texts are decoded by us, from the ids
        "skip_special_tokens": False,
        "logprobs": 0 if request.logprobs else None,  # 0 = of the sampled token alone
        "flat_logprobs": True,
        **({"logit_bias": dict.fromkeys(forbidden, -100.0)} if forbidden else {}),
    }


# Those that report the log-probs of the prompt. Greedy, so that nothing is drawn.
SCORING = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


def lora_slot(rank: int) -> int:
    """The smallest adapter rank that vLLM can be started with and that holds `rank`. Raises RecipeError."""
    for slot in LORA_RANKS:
        if rank <= slot:
            return slot
    raise RecipeError(f"model.lora.rank {rank} is more than vLLM serves", allowed=f"at most {LORA_RANKS[-1]}")


def error_of(cause: Exception, section: Vllm, what: str, log: Path | None = None) -> EngineError:
    """What vLLM's exception means for the recipe. log: of a process whose own error comes first."""
    text = "; ".join(e["msg"] for e in cause.errors()) if isinstance(cause, ValidationError) else str(cause)
    first = text.strip().splitlines()[0] if text.strip() else ""
    said = f"{type(cause).__name__}: {first}" if first else type(cause).__name__
    return error_with_hint(last_error(log) or said, section, what)


def error_with_hint(said: str, section: Vllm, what: str) -> EngineError:
    """The error with the hint that belongs to what vLLM said."""
    hint = "VLLM_LOGGING_LEVEL=INFO shows vLLM's own messages; rollout.engine: transformers works without it"
    if "head_dim" in said or "head size" in said.lower():
        hint = "vLLM has no attention kernel for this model's head size here; use rollout.engine: transformers"
    elif "CompileError" in said:
        hint = (
            "rollout.vllm.enforce_eager: true starts without compiling; on a CPU the path of vLLM's cache must have no"
            " space: VLLM_CACHE_ROOT, by default in the home directory"
        )
    elif "No space left on device" in said:
        hint = "/dev/shm or the folder for temporary files is full; a container gets a larger /dev/shm by --shm-size"
    elif "memory" in said.lower() or "cache blocks" in said.lower():
        hint = memory_hint(section)
    return EngineError(f"vLLM {what}: {said}", hint=hint)


def last_error(log: Path | None) -> str:
    """The last error in the log of an engine's process, as `Type: message`; "" if there is none."""
    return last_error_of(read_log(log))


def last_error_of(text: str) -> str:
    """The last error in what a process has said, as `last_error`."""
    found = _ERROR.findall(text)
    return f"{found[-1][0].rpartition('.')[2]}: {found[-1][1].strip()}" if found else ""


def read_log(log: Path | None) -> str:
    """What an engine's process has said; "" where that is not known."""
    try:
        return "" if log is None else log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def death_error(code: int | None, log: Path, section: Vllm) -> EngineError:
    """What to say of an engine's process that ended by itself, or because one of its workers did."""
    text, process = read_log(log), "process"
    if died := _WORKER_DIED.search(text):
        process, code, text = f"worker process {died[1]}", int(died[2]) if died[2] else None, text[: died.start()]
    said = last_error_of(text)
    killed = "" if code is None or code >= 0 else f"was killed by signal {-code} ({signal.Signals(-code).name})"
    if killed or (died and code is None and not said):
        short = ": without anyone's doing that is most often the system's when memory is short"
        return EngineError(
            f"vLLM's {process} {killed or 'has ended'}{short if code in (None, -signal.SIGKILL) else ''}",
            hint="go on with the same command and --resume",
        )
    if said:
        return error_with_hint(said, section, "failed")
    return EngineError(f"vLLM's {process} ended with code {code}", hint=f"what it said is in {log}")


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
