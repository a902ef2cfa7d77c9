"""Sections of the inference engine: transformers or vLLM, next to the trainer or on servers. Does not import torch."""

import itertools
import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from posttrain.errors import count_noun
from posttrain.recipe.sampling_sections import STORED
from posttrain.recipe.section import Count, Idle, Positive, Refused, Section

VLLM_CHUNK = 4096  # sequences per call in an evaluation: keeps vLLM's batch full; a stop loses one chunk at most
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks with kernels in every vLLM from 0.22 to 0.32
ADDRESS = re.compile(r"http://[^/\s:@]+:\d+/?")


def _allow_shorthands(schema: dict[str, Any]) -> None:
    full_schema = dict(schema)
    schema.clear()
    urls = {"type": "array", "items": {"type": "string"}, "description": "short for `urls: [...]`"}
    schema["anyOf"] = [urls, {"type": "string", "description": "short for `file: FILE`"}, full_schema]


class Server(Section):
    """vLLM processes with their own GPUs, instead of vLLM on the trainer's GPUs. A list is short for `urls`, a text for
    `file`."""

    model_config = ConfigDict(json_schema_extra=_allow_shorthands)

    urls: list[str] = Field(
        default_factory=list,
        description="addresses of `posttrain serve` processes, here or on other machines: "
        "[http://node2:8100]; all training processes use all of them",
    )
    file: str | None = Field(
        None,
        description="or a file with one address per line, read again at every weight sync: servers may be "
        "added and removed during the run",
    )
    devices: list[Count] = Field(
        default_factory=list,
        description="or GPUs of this machine; the run starts and stops one process on each: [1]; a GPU listed "
        "twice gets two engines",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="longest wait for a reply of a server")

    @model_validator(mode="before")
    @classmethod
    def _addresses_alone(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"urls": value}
        if isinstance(value, str):
            return {"urls": [value]} if ADDRESS.fullmatch(value) else {"file": value}
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        """Check that the addresses are given in exactly one form, are valid, and are distinct."""
        if sum(map(bool, (self.urls, self.devices, self.file))) != 1:
            raise ValueError("give one of `urls`, `file` and `devices`")
        for url in self.urls:
            if not ADDRESS.fullmatch(url):
                raise ValueError(f"`{url}` is not an address of a server: write http://HOST:PORT")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("a server is listed twice")
        return self


class Vllm(Section):
    """Settings of the vLLM engine."""

    gpu_memory: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="share of the GPU's memory for an engine's weights and KV cache; default: 0.3 next to the "
        "trainer, 0.9 with `server`, divided by the number of engines on the GPU",
    )
    engines: Annotated[
        Positive, Idle("server", "with `server`", "name a GPU several times in `server.devices`, or start more servers")
    ] = Field(
        1,
        description="vLLM processes next to each trainer, sharing its GPU and the requests: with a small "
        "model and hundreds of sequences a decoding step waits for vLLM's scheduler, which uses "
        "one CPU core per process",
    )
    max_model_len: Annotated[
        Positive | None,
        Refused(
            "engine = vllm and max_model_len <= max_new_tokens",
            "{max_model_len} has no room for a prompt and {max_new_tokens} new tokens",
            "write a larger one",
        ),
        Refused(
            "engine = vllm and max_model_len <= sampling.max_new_tokens",
            "{max_model_len} has no room for a prompt and {sampling.max_new_tokens} new tokens",
            "write a larger one",
        ),
    ] = Field(None, description="maximum length of prompt + completion; default: what the data needs")
    enforce_eager: bool = Field(False, description="start faster, generate more slowly (no CUDA graphs)")
    sleep: Annotated[
        bool,
        Idle("server", "with `server`, which has its own GPU"),
        Idle("stage != rl and engine = vllm", "in {stage}: nothing else needs the engine's memory", note=True),
    ] = Field(False, description="free the engine's memory during the update")
    merge_adapter: Annotated[
        bool, Idle("stage = rl and not model.lora", "without an adapter", "remove it, or train one: `model.lora`")
    ] = Field(
        False,
        description="with LoRA: merge the adapter into the base weights at every weight sync; false: only the "
        "adapter is sent and the engine applies it separately, which is exact but slower",
    )
    server: Annotated[Server | None, Idle("engine != vllm", "with {.engine} {engine}", "also write `engine: vllm`")] = (
        Field(None, description="generate on other GPUs or machines")
    )
    tensor_parallel: Annotated[
        Positive,
        Refused(
            "stage != rl and engine = vllm and tensor_parallel > 1 and not server",
            "{stage} generates in one process with one GPU",
            "also write `{.server}`, e.g. `{devices: [0, 1]}`",
        ),
    ] = Field(
        1,
        description="GPUs per engine (tensor parallelism): with `server` its own GPUs, else the GPUs of this "
        "many neighboring training processes (`--gpus`), which share the engine",
    )

    @property
    def share(self) -> float:
        """`gpu_memory`, or its default."""
        whole = 0.9 if self.server else 0.3
        return whole / self.engines_a_gpu if self.gpu_memory is None else self.gpu_memory

    @property
    def engines_a_gpu(self) -> int:
        """Largest number of engines that the run starts on one GPU."""
        return max(Counter(itertools.chain(*self.places)).values(), default=1) if self.server else self.engines

    @property
    def places(self) -> list[tuple[int, ...]]:
        """GPUs of each engine that the run starts itself."""
        size, devices = self.tensor_parallel, self.server.devices if self.server else []
        return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]

    @property
    def servers(self) -> int:
        """Number of engines outside the trainer, 0 without a server. A file of addresses counts as one, since it may
        change."""
        return (len(self.places or self.server.urls) or 1) if self.server else 0

    @model_validator(mode="after")
    def _room(self) -> Self:
        """Check that each engine has distinct GPUs, and that the engines of a GPU fit into its memory."""
        twice = next((place for place in self.places if len(set(place)) < len(place)), None)
        if twice is not None:
            raise ValueError(f"server.devices names a GPU twice for one engine: {', '.join(map(str, twice))}")
        if self.share * self.engines_a_gpu > 1:
            raise ValueError(
                f"gpu_memory {self.gpu_memory} is an engine's share, and {self.engines_a_gpu} of them have the same GPU"
            )
        return self


class EngineSection(Section):
    """The engine that generates completions."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="engine that generates completions")
    batch_size: Annotated[
        Positive,
        Idle(
            f"engine = vllm and stage = rl or engine = vllm and stage != harness and batch_size <= {VLLM_CHUNK}",
            "with {.engine} vllm, which fills its own batches",
            note=True,
        ),
        STORED,
    ] = Field(512, description="sequences generated together (transformers)")
    vllm: Annotated[
        Vllm,
        Idle(
            "engine != vllm",
            "with {.engine} {engine}",
            "also write `engine: vllm`, or remove it",
            note=True,
            below=True,
        ),
    ] = Field(default_factory=Vllm)

    @model_validator(mode="after")
    def _whole_engines(self) -> Self:
        """Check that the engines and GPUs match `tensor_parallel`."""
        size, server = self.vllm.tensor_parallel, self.vllm.server
        if size > 1 and server is None and self.vllm.engines > 1:
            raise ValueError(
                f"vllm.tensor_parallel: {size} makes one engine of the GPUs of {size} training processes: vllm.engines"
                " must be 1"
            )
        if server is not None and len(server.devices) % size:
            raise ValueError(
                f"vllm.server.devices names {count_noun(len(server.devices), 'GPU')}; with vllm.tensor_parallel: {size}"
                f" it must be a multiple of {size}"
            )
        return self
