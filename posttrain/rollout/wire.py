"""What travels between a run and an engine in another process: JSON, raw tensors, and errors. Nothing is unpickled.

    GET  /health             what it is and what it does
    POST /session            one run at a time; the server ends the session when this connection ends
    PUT  /files/FOLDER/NAME  a file of the model folder or of an adapter
    POST /start              vLLM on that folder
    POST /generate           requests in, a line of JSON for each as it is finished
    POST /pause              that call ends soon, with what was sampled
    POST /shared             whether it can map our memory
    POST /weights            one bucket of tensors, or where it is mapped: all weights, or what is to be added to a base
                             that the server holds; /adapter: the adapter in an uploaded folder
    POST /logps              log-probs of the probe's sequence

All carry the server's token in the header `X-Token` (see `token`); all but the first two the session's name in
`X-Session`. Without the token nothing is read and nothing is answered.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from posttrain import errors
from posttrain.models.host_memory import ALIGNED
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.engine import Completion
from posttrain.rollout.pushed import Request

PROTOCOL = 5  # rises with every change that an older side would misread
SESSION, TOKEN = "X-Session", "X-Token"
BUCKET_BYTES = 256 << 20

Body = Sequence[bytes | memoryview]


def generation(requests: Sequence[Request], sampling: Sampling, seed: int) -> dict[str, Any]:
    """The JSON of /generate."""
    shared = {name: getattr(sampling, name) for name in Sampling.model_fields}
    return {"requests": [asdict(r) for r in requests], "sampling": shared, "seed": seed}


def read_generation(values: dict[str, Any]) -> tuple[list[Request], Sampling, int]:
    """What `generation` was given."""
    requests = [Request(**{**r, "ids": tuple(r["ids"])}) for r in values["requests"]]
    return requests, Sampling.model_validate(values["sampling"]), int(values["seed"])


def samples(completions: Sequence[Completion]) -> list[list[Any]]:
    """The completions of one request for JSON. Python writes floats so that they read back to the last bit."""
    return [[c.ids, c.logps, c.finish] for c in completions]


def read_samples(values: Sequence[Sequence[Any]]) -> list[Completion]:
    """What `samples` was given."""
    return [Completion(tuple(ids), None if logps is None else tuple(logps), end) for ids, logps, end in values]


def buckets(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, size: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors on the CPU, floating ones in `dtype` (None: their own), in lists of about `size` bytes."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in named:
        moved = tensor.to("cpu", dtype if dtype and tensor.is_floating_point() else tensor.dtype).contiguous()
        bucket.append((name, moved))
        held += moved.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    yield bucket  # the last one, empty or not, says that it is the last


def pack(named: Sequence[tuple[str, Tensor]]) -> Body:
    """Eight bytes with the length of a JSON header, the header, and the tensors' own memory: nothing is copied. Each
    part begins at a multiple of ALIGNED, as tensors of any type may."""
    listed = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in named]
    header = json.dumps(listed).encode()
    header += b" " * (-(8 + len(header)) % ALIGNED)
    parts: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header]
    for _, tensor in named:
        if tensor.numel():
            parts += [tensor.reshape(-1).view(torch.uint8).numpy().data, bytes(-tensor.nbytes % ALIGNED)]
    return parts


def unpack(body: bytearray | mmap.mmap) -> list[tuple[str, Tensor]]:
    """What `pack` was given. The tensors share the memory of `body`. Raises ValueError for a body cut short."""
    start = 8 + int.from_bytes(body[:8], "little")
    named = []
    for name, kind, shape in json.loads(bytes(body[8:start])):
        dtype, count = getattr(torch, kind, None), math.prod(shape)
        if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"tensor {name} has no type or shape")
        if start + count * dtype.itemsize > len(body):
            raise ValueError(f"tensor {name} is cut short")
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        named.append((name, flat.reshape(shape)))
        start += count * dtype.itemsize
        start += -start % ALIGNED
    return named


def told(error: BaseException) -> dict[str, Any]:
    """An error for JSON."""
    if not isinstance(error, errors.PosttrainError):
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return {"error": "EngineError", "what": text, "allowed": "", "hint": ""}
    first = error.problems[0]
    return {"error": type(error).__name__, "what": first.what, "allowed": first.allowed, "hint": first.hint}


def error_of(values: dict[str, Any], where: str) -> errors.PosttrainError:
    """What `told` was given, with the server's address."""
    kind = getattr(errors, values["error"], errors.EngineError)
    if kind is errors.MissingExtra or not issubclass(kind, errors.PosttrainError):
        kind = errors.EngineError
    return kind(values["what"], where=where, allowed=values["allowed"], hint=values["hint"])
