"""Safetensors folders on disk, read by name and written one tensor at a time.

Writing lays out a shard from names, dtypes and shapes alone and then streams the data, so that a merge needs memory for
a few tensors instead of a model. Format: 8 bytes little-endian header length, a JSON header, then the data without gaps
(https://github.com/huggingface/safetensors#format). The library's `save_file` needs all tensors of a file in memory;
here each tensor is held only while it is written.

Shapes: tensors have any shape; a Spec names it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.run.atomic_io import sync_file

INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
SYNC_BYTES = 256 * 10**6  # bytes written to a file between two calls of `sync`

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: word for word, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Spec:
    """Dtype, shape and location of a tensor, without values.

    `file` holds the tensor from byte `start`; None if it is not written yet.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def scan(folder: Path) -> dict[str, Spec]:
    """Return the spec of every tensor of a model folder by name; reads headers only.

    Raises MergeError for a folder without safetensors, a shard that is missing, truncated or unreadable, and a tensor
    that is stored twice or is not in the file that the index names.
    """
    files = _find_shards(folder)
    tensors: dict[str, Spec] = {}
    for file in files:
        for name, spec in read_header(file).items():
            if name in tensors:
                raise MergeError(f"{name} is stored twice", where=str(folder))
            tensors[name] = spec
    for name, file_name in _read_weight_map(folder).items():
        found = tensors.get(name)
        if found is None or found.file is None or found.file.name != file_name:
            raise MergeError(f"{name} is not in {file_name}, where the index says it is", where=str(folder))
    return tensors


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return the index's mapping from tensor name to file name; {} without an index."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as cause:
        raise MergeError(f"unreadable index: {cause}", where=str(path)) from cause


def _find_shards(folder: Path) -> list[Path]:
    """Return the weight files: those named in the index, else model.safetensors, else the only safetensors file."""
    named = sorted(set(_read_weight_map(folder).values()))
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise MergeError(f"missing shards: {', '.join(missing)}", where=str(folder), hint="download the model again")
    if named:
        return [folder / name for name in named]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        return shards
    if shards:
        raise MergeError(f"{len(shards)} safetensors files but no {INDEX_NAME}", where=str(folder))
    old = any(folder.glob("*.bin"))
    hint = "only pickled .bin weights are here; load them in transformers and save again" if old else ""
    raise MergeError("no safetensors weights", where=str(folder), hint=hint)


def read_header(file: Path) -> dict[str, Spec]:
    """Return the spec of every tensor of one safetensors file. Raises MergeError if it is truncated or malformed."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise MergeError("not a safetensors file, or cut short in its header", where=str(file))
        try:
            header = json.loads(stream.read(length))
        except ValueError as cause:
            raise MergeError(f"unreadable safetensors header: {cause}", where=str(file)) from cause
    header.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        hint = "download or save it again" if size < expected else ""
        what = "truncated shard" if size < expected else "shard with extra bytes after its tensors"
        raise MergeError(f"{what}: {size:,} bytes where its header says {expected:,}", where=str(file), hint=hint)
    return {
        name: Spec(
            _parse_dtype(entry["dtype"], name, file), tuple(entry["shape"]), file, 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


def _parse_dtype(word: str, name: str, file: Path) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name. Raises MergeError for a dtype that cannot be merged."""
    if word not in DTYPES:
        raise MergeError(
            f"{name} is stored as {word}",
            where=str(file),
            allowed=f"can be merged: {', '.join(DTYPES)}",
            hint="dequantise the model first",
        )
    return DTYPES[word]


@contextmanager
def open_reader(tensors: Mapping[str, Spec]) -> Iterator[Callable[[str], Tensor]]:
    """Provide a function that reads one tensor by name; files are opened once and closed at the end of the block.

    All tensors are read into one buffer of the size of the largest: each call overwrites the previous result. Files are
    read instead of mapped: mapped pages would stay in the process's memory until the files are closed, and the kernel
    would zero newly allocated memory.
    """
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        memory = torch.empty(max((spec.nbytes for spec in tensors.values()), default=0), dtype=torch.uint8)

        def read(name: str) -> Tensor:
            spec = tensors[name]
            assert spec.file is not None, name
            if spec.file not in opened:
                opened[spec.file] = stack.enter_context(spec.file.open("rb", buffering=0))
            return _read(opened[spec.file], spec, memory[: spec.nbytes])

        yield read


def _read(stream: Any, spec: Spec, memory: Tensor) -> Tensor:
    """Read one tensor from an open file into `memory` and return a view of it."""
    left = memory.numpy().data
    stream.seek(spec.start)
    while left:
        count = stream.readinto(left)
        if not count:
            raise MergeError("a file became shorter while it was read", where=str(spec.file))
        left = left[count:]
    return view_as_spec(memory, spec)


def view_as_spec(memory: Tensor, spec: Spec) -> Tensor:
    """View the first bytes of a uint8 vector as the tensor of a spec. The result has any shape."""
    return memory[: spec.nbytes].view(spec.dtype).view(spec.shape)


def split_into_shards(specs: Mapping[str, Spec], limit: int = SHARD_BYTES) -> list[list[str]]:
    """Group names, in the given order, into shards of at most `limit` bytes; a single tensor may exceed it."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.nbytes
    return shards


def write(
    folder: Path,
    specs: Mapping[str, Spec],
    produce: Callable[[str], Tensor],
    limit: int = SHARD_BYTES,
    *,
    sync: Callable[[Path], None] = sync_file,
) -> list[Path]:
    """Write a model's tensors, calling `produce` for each, and an index if there is more than one shard.

    A tensor is written while the next one is produced: its memory must not change until the tensor after the next is
    requested. `sync` is called with a file that has grown, and finally when the file is complete; the caller must wait
    for whatever `sync` does asynchronously. Raises ValueError if a produced tensor does not match its spec.
    """
    shards = split_into_shards(specs, limit)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, {tensor: specs[tensor] for tensor in shard}, produce, sync)
    return [folder / name for name in names]


def _write_shard(
    file: Path, specs: Mapping[str, Spec], produce: Callable[[str], Tensor], sync: Callable[[Path], None]
) -> None:
    """Write one safetensors file, producing each tensor while the previous one is written."""
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))  # wide dtypes first keep data aligned
    with file.open("wb") as stream, ThreadPoolExecutor(1, thread_name_prefix="write") as thread:
        writing: Future[int] = thread.submit(stream.write, _build_header(specs, order))
        unsynced = 0
        for name in order:
            tensor, spec = produce(name), specs[name]
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} where {spec} was planned")
            writing.result()
            # memoryview of bytes: numpy has no bfloat16
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            writing = thread.submit(stream.write, data)
            unsynced += spec.nbytes
            if unsynced > SYNC_BYTES:
                sync(file)
                unsynced = 0
        writing.result()
    sync(file)


def _build_header(specs: Mapping[str, Spec], order: Sequence[str]) -> bytes:
    """Return the length-prefixed JSON header of a safetensors file, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        spec = specs[name]
        end = offset + spec.nbytes
        entries[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
