"""Hugging Face folder of a sharded model, written by all ranks: each writes some of the layers, as whole weights.

Weights are all-gathered one by one, and one rank keeps each on its host: no rank holds the whole model, and no GPU
holds more than its shard and one weight. The files are the same as from `save_pretrained`: in full training in the
matmul dtype; under LoRA the base with the adapter merged in, in the base's dtype. If the base is stored elsewhere, only
the adapter is written.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from posttrain.errors import RunError
from posttrain.models import adapters
from posttrain.models.load import LoadedModel
from posttrain.models.pretrained import suppress_progress_bars
from posttrain.models.save import (
    adapters_report,
    compare_logits,
    probe_logits,
    save,
    sync_all,
    verify_folder,
    write_beside,
    write_dtype,
)
from posttrain.models.save_adapter import adapter_folders, base_is_stored, is_resized, write_adapter
from posttrain.models.slices import INDEX, SINGLE
from posttrain.models.weight_names import layer_of, save_under_published_names, to_published_names
from posttrain.models.weights import dense_weights
from posttrain.run.atomic_io import explain_write_errors, put_in_place, write_json
from posttrain.train import distributed, sharding

FILE_BYTES = 5_000_000_000  # maximum size of a weight file


@dataclass(frozen=True)
class Share:
    """Files to be written by this rank.

    files: tensors by published names, by file. index: model.safetensors.index.json of all files. sums: SHA-256 of each
    whole weight of all ranks by module name, if requested.
    """

    files: dict[str, dict[str, Tensor]]
    index: dict[str, Any]
    sums: dict[str, str]


def save_model(loaded: LoadedModel, folder: Path, saver: Any = save) -> dict[str, Any]:
    """Write the trained model into `folder` and verify it; return the report of `models.save`. All ranks call this.

    saver: `models.save.save`, or a function that writes another kind of model. A sharded model is written by all ranks
    instead, unless its adapter can be merged only by PEFT, in an ordinary model on rank 0's host.
    """
    if loaded.is_sharded and not loaded.is_lora:
        return save_sharded_model(loaded, folder)
    if loaded.is_sharded and saver is save and _is_written_by_weight(loaded):
        return save_sharded_adapters(loaded, folder)
    report: dict[str, Any] = distributed.run_on_rank0(saver, sharding.gather_model(loaded), folder)
    return report


def save_sharded_model(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """Save a sharded model in full training, like `models.save.save`.

    Rank 0 reloads the folder with plain transformers on its host; every weight must be bitwise equal to the ranks'
    weight rounded to the folder's dtype. Raises RunError.
    """
    unfinished = folder.with_name(folder.name + ".tmp")
    share = assign_weights(loaded, hashed=True)
    distributed.run_on_rank0(_begin, loaded, share.index, unfinished)
    distributed.run_all_or_raise(write_files, share, unfinished)
    return distributed.run_on_rank0(_finish, loaded, share.sums, unfinished, folder)


def _is_written_by_weight(loaded: LoadedModel) -> bool:
    """Return whether no rank needs the whole sharded base: each adapter is saved alone, or merged weight by weight."""
    origin = loaded.origin
    if is_resized(loaded) or (origin is not None and origin.section.quantize is not None):
        return False
    return base_is_stored(loaded) or adapters.is_merged_by_weight(loaded.model)


def save_sharded_adapters(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """Save adapters of a sharded base, like `models.save.save`; all ranks call this.

    Rank 0 reloads the folder on its host; its logits must equal those of the sharded model. Raises RunError.
    """
    unfinished = folder.with_name(folder.name + ".tmp")
    distributed.run_on_rank0(_make_empty, unfinished)
    folders = adapter_folders(loaded, unfinished)
    reports = {name: _save_adapter(loaded, path, name) for name, path in folders.items()}
    adapters.activate(loaded.model)
    distributed.run_on_rank0(put_in_place, unfinished, folder)
    if len(reports) > 1:
        return {"path": str(folder), **adapters_report(reports)}
    return {"path": str(folder), **reports[next(iter(reports))]}


def _save_adapter(loaded: LoadedModel, folder: Path, name: str) -> dict[str, Any]:
    """Save one adapter, merged into its base if the base is not stored elsewhere."""
    adapters.activate(loaded.model, name)
    with loaded.autocast(), suppress_progress_bars():
        expected = probe_logits(loaded.model, loaded.tokenizer, reader=loaded.images)
    merged = not base_is_stored(loaded)
    distributed.run_on_rank0(_write_adapter, loaded, folder / "adapter" if merged else folder, name)
    if merged:
        share = assign_weights(loaded, adapter=name)
        distributed.run_on_rank0(write_config, loaded, share.index, folder)
        distributed.run_all_or_raise(write_files, share, folder)
    kind = "merged" if merged else "adapter"
    return distributed.run_on_rank0(_check_adapter, loaded, folder, kind, expected)


def _write_adapter(loaded: LoadedModel, folder: Path, name: str) -> None:
    with explain_write_errors(folder), suppress_progress_bars():
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(loaded, folder, name)


def _check_adapter(loaded: LoadedModel, folder: Path, kind: str, expected: Tensor) -> dict[str, Any]:
    with explain_write_errors(folder), suppress_progress_bars():
        write_beside(loaded, folder)
        report = {"kind": kind, "bytes": sync_all(folder)}
    return report | verify_folder(loaded, folder, partial(compare_logits, expected=expected, allowance=2))


def _make_empty(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    with explain_write_errors(unfinished):
        unfinished.mkdir(parents=True)


def _begin(loaded: LoadedModel, index: dict[str, Any], unfinished: Path) -> None:
    _make_empty(unfinished)
    with explain_write_errors(unfinished):
        write_config(loaded, index, unfinished)


def _finish(loaded: LoadedModel, sums: Mapping[str, str], unfinished: Path, folder: Path) -> dict[str, Any]:
    with explain_write_errors(unfinished), suppress_progress_bars():
        write_beside(loaded, unfinished)
        report = {"path": str(folder), "kind": "full", "bytes": sync_all(unfinished)}
    report |= verify_folder(loaded, unfinished, partial(_compare_weights, sums=sums, dtype=loaded.half))
    put_in_place(unfinished, folder)
    return report


def assign_weights(loaded: LoadedModel, *, adapter: str | None = None, hashed: bool = False) -> Share:
    """All-gather the weights one by one and assign each layer to the rank with the least weights so far.

    adapter: name of an adapter to merge in. All ranks call this; if a rank runs out of host memory, all raise.
    """
    rank, assigned = distributed.rank(), [0] * distributed.world()
    mine: dict[str, Tensor] = {}
    sums: dict[str, str] = {}
    error: Exception | None = None  # error of this rank, which must still take part in gathering
    dtype = loaded.half if adapter is None else None
    for _, group in groupby(_whole_weights(loaded, adapter), lambda item: layer_of(item[0])):
        owner = assigned.index(min(assigned))
        layer: dict[str, Tensor] = {}
        for name, full in group:
            assigned[owner] += full.numel()
            if owner == rank and error is None:
                copied = distributed.capture(_copy_to_host, full, dtype)
                layer[name], error = copied.value, copied.error
        if layer and error is None:
            sums |= {name: _sha256(tensor) for name, tensor in layer.items()} if hashed else {}
            mine |= to_published_names(adapters.causal_of(loaded.skeleton), layer)
    chunks = list(_chunks(mine, FILE_BYTES))
    gathered = distributed.gather_or_raise(
        distributed.Captured(([{n: t.nbytes for n, t in chunk.items()} for chunk in chunks], sums), error)
    )
    names, index = _name_files([sizes for sizes, _ in gathered])
    return Share(
        dict(zip(names[rank], chunks, strict=True)), index, {n: s for _, sizes in gathered for n, s in sizes.items()}
    )


def _copy_to_host(full: Tensor, dtype: torch.dtype | None) -> Tensor:
    return _round_to(full, dtype).to("cpu", copy=True)


def _whole_weights(loaded: LoadedModel, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model's state_dict, tied ones once, each all-gathered on demand.

    With an adapter: the tensors of the base with the adapter merged in.
    """
    if adapter is not None:
        yield from dense_weights(loaded.model, merged=True, adapter=adapter)
        return
    for name, tensor in sharding.distinct_state(loaded.model).items():
        yield name, sharding.full_tensor(tensor.detach())


def _round_to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _chunks(weights: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Group weights in their order into files of at most `limit` bytes; a larger weight gets its own file.

    Views are copied.
    """
    chunk, size = dict[str, Tensor](), 0
    for name, tensor in weights.items():
        if chunk and size + tensor.nbytes > limit:
            yield chunk
            chunk, size = {}, 0
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        chunk[name] = tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _name_files(sizes: Iterable[list[dict[str, int]]]) -> tuple[list[list[str]], dict[str, Any]]:
    """Name the files of each rank, and build the index of all. sizes: by rank and file, bytes of each weight."""
    by_rank = list(sizes)
    total = sum(map(len, by_rank))
    numbers = iter(range(1, total + 1))
    names = [[f"model-{next(numbers):05}-of-{total:05}.safetensors" for _ in files] for files in by_rank]
    where = {
        weight: name
        for own, files in zip(names, by_rank, strict=True)
        for name, file in zip(own, files, strict=True)
        for weight in file
    }
    size = sum(n for files in by_rank for file in files for n in file.values())
    return names, {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}


def write_files(share: Share, folder: Path) -> None:
    """Write this rank's weight files. Raises RunError if this rank does not see the folder that rank 0 has created."""
    if not folder.is_dir():
        raise RunError(
            f"rank {distributed.rank()} does not see {folder}, which rank 0 has created",
            hint="all ranks write a sharded model: set --output to a disk shared by all machines",
        )
    with explain_write_errors(folder):
        for name, tensors in share.files.items():
            save_file(tensors, folder / name, metadata={"format": "pt"})


def write_config(loaded: LoadedModel, index: dict[str, Any], folder: Path) -> None:
    """Write config.json, the weight index, and the model's custom code.

    Call before `write_files`: transformers deletes weight files that it did not write.
    """
    with suppress_progress_bars():
        save_under_published_names(adapters.causal_of(loaded.skeleton)).save_pretrained(folder, state_dict={})
    (folder / SINGLE).unlink(missing_ok=True)  # it contains no weights
    if loaded.half is not None and not loaded.is_lora:
        write_dtype(folder, loaded.half)
    write_json(folder / INDEX, index)


def _compare_weights(
    model: Any, tokenizer: Any, reader: Any, folder: Path, *, sums: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, Any]:
    """Check that a reloaded model has the weights with these SHA-256 sums. Raises RunError."""
    del tokenizer, reader
    hashes = {n: _sha256(_round_to(t.detach(), dtype)) for n, t in sharding.distinct_state(model).items()}
    wrong = sorted(name for name in sums.keys() | hashes.keys() if sums.get(name) != hashes.get(name))
    if wrong:
        raise RunError(
            f"the saved model has other weights than the one in memory: {', '.join(wrong[:3])}"
            + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            where=str(folder),
        )
    return {"weights_compared": len(hashes)}
